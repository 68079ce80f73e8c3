"""Dropout whose mask is a function of (seed, step, site, global element), not of a generator.

    y = dropout(x, rng, p, site, ...)      y = x / (1 - p) where kept, else 0

``rng`` is int64[3]: seed, step, global index of the micro-batch's first sample. An element is
numbered ``sample * (elements per sample) + its row-major place in the sample``, in the *global*
value, so the mask is the same for every mesh, number of micro-batches and recomputation. Samples
lie along ``batch_dim``, ``rows`` (global) rows each; ``batch_dim`` -1 says that the value does not
depend on the batch, and then all ranks and micro-batches draw the same mask.

Where the value is sharded, shard i lies along ``dims[i]`` over ``axes[i]`` of ``sizes[i]`` ranks
and its blocks (see ``ir.placement.Shard``) are the next ``counts[i]`` entries of ``blocks``; a
count of 0 means one block. The backward is the same op on the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoshard.ops.communicator import Communicator
from autoshard.ops.dropout_runs import run_kernel
from autoshard.ops.library import define
from autoshard.ops.philox import WORDS_PER_GROUP, group_words, keep_mask, keep_threshold

RNG_SHAPE = (3,)


class DropoutArgs(NamedTuple):
    """The operator's arguments in order: ``DropoutArgs(*node.args)._replace(batch_dim=0)``."""

    x: Any
    rng: Any
    p: float
    site: int
    batch_dim: int = -1
    rows: int = 1
    dims: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    def sharded(self, dim: int, blocks: tuple[int, ...], axis: str, size: int) -> DropoutArgs:
        """Return the arguments for a value that is also split along ``dim`` over ``axis``."""
        return self._replace(
            dims=(*self.dims, dim),
            counts=(*self.counts, len(blocks)),
            blocks=(*self.blocks, *blocks),
            axes=(*self.axes, axis),
            sizes=(*self.sizes, size),
        )

    def shards(self) -> Iterator[tuple[int, tuple[int, ...], str]]:
        """Yield dim, global block sizes (none: one block) and axis of each shard."""
        used = 0
        for dim, count, axis in zip(self.dims, self.counts, self.axes, strict=True):
            yield dim, tuple(self.blocks[used : used + count]), axis
            used += count


def global_index(args: DropoutArgs, comm: Communicator, every: int = 1) -> Tensor:
    """Return the global number of each local element of ``args.x``, as int64 of its shape.

    With ``every`` only of each so-many-th element along the last dimension.
    """
    x, device = args.x, args.x.device
    places = [torch.arange(n, device=device) for n in x.shape]
    extents = list(x.shape)
    for (dim, blocks, axis), size in zip(_shards(args), args.sizes, strict=True):
        places[dim] = _global_place(blocks, comm.index(axis), size, device)[places[dim]]
        extents[dim] *= size
    if every > 1:
        places[-1] = places[-1][::every]
    if args.batch_dim < 0:
        return _row_major(places, extents)
    place = places[args.batch_dim]
    sample = args.rng[2] + place // args.rows
    places[args.batch_dim] = place % args.rows
    extents[args.batch_dim] = args.rows
    shape = [1] * len(extents)
    shape[args.batch_dim] = -1
    return sample.view(shape) * math.prod(extents) + _row_major(places, extents)


def keep(args: DropoutArgs, comm: Communicator) -> Tensor:
    """Return which elements of ``args.x`` stay, as bool."""
    seed, step = args.rng[0], args.rng[1]
    if not _has_whole_groups(args):
        return keep_mask(global_index(args, comm), args.p, seed, step, args.site)
    # Four neighbours share one generator call.
    group = global_index(args, comm, WORDS_PER_GROUP) // WORDS_PER_GROUP
    words = torch.stack(group_words(group, seed, step, args.site), -1)
    return (words >= keep_threshold(args.p)).view(args.x.shape)


def _has_whole_groups(args: DropoutArgs) -> bool:
    """Tell whether the last dimension is made of aligned groups of four."""
    last = args.x.dim() - 1
    if last < 0 or args.batch_dim == last or not args.x.numel():
        return False
    pieces = [args.x.shape[last]]
    for (dim, blocks, _), size in zip(_shards(args), args.sizes, strict=True):
        pieces += [block // size for block in blocks] if dim == last else []
    return all(piece % WORDS_PER_GROUP == 0 for piece in pieces)


def _shards(args: DropoutArgs) -> Iterator[tuple[int, tuple[int, ...], str]]:
    """Yield dim, global block sizes and axis of each shard."""
    extents = list(args.x.shape)
    for (dim, blocks, axis), size in zip(args.shards(), args.sizes, strict=True):
        extents[dim] *= size
        yield dim, blocks or (extents[dim],), axis


def _global_place(blocks: tuple[int, ...], index: int, size: int, device: Any) -> Tensor:
    """Return where each local row of rank ``index`` lies in the whole dimension."""
    parts, start = [], 0
    for block in blocks:
        step = block // size
        parts.append(torch.arange(step, device=device) + (start + index * step))
        start += block
    return torch.cat(parts)


def _row_major(places: list[Tensor], extents: list[int]) -> Tensor:
    total = torch.zeros([], dtype=torch.int64, device=places[0].device if places else None)
    for dim, place in enumerate(places):
        shape = [1] * len(places)
        shape[dim] = -1
        total = total + place.view(shape) * math.prod(extents[dim + 1 :])
    return total


def _run(comm: Communicator, *given: Any) -> Tensor:
    args = DropoutArgs(*given)
    if not (torch.is_grad_enabled() and args.x.requires_grad):
        done = run_kernel(args, comm)
        if done is not None:
            return done
    with torch.no_grad():
        scale = keep(args, comm).to(args.x.dtype) / (1.0 - args.p)
    return (args.x * scale).contiguous()


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.rest = inputs[2:]


def _backward(ctx: Any, grad: Tensor) -> tuple:
    (rng,) = ctx.saved_tensors
    return (dropout(grad, rng, *ctx.rest), *[None] * 10)


dropout = define(
    "dropout(Tensor x, Tensor rng, float p, int site, int batch_dim, int rows, int[] dims,"
    " int[] counts, int[] blocks, str[] axes, int[] sizes) -> Tensor",
    fake=lambda x, *rest: torch.empty_like(x, memory_format=torch.contiguous_format),
    run=_run,
    backward=_backward,
    setup=_setup,
)
