"""Collectives as functional graph nodes. Each is one node that names its dim and its mesh axis.

Transposes (what autograd puts in the backward graph), with R replicated, S shard, P partial:

=================  =========  ==========================================================
op                 placement  cotangent
=================  =========  ==========================================================
copy_to            R -> R     P -> R: all_reduce (the use is sharded, so its cotangent is partial)
all_reduce         P -> R     R -> R: identity
all_gather         S -> R     R -> S: shard; with ``reduce_grad`` P -> S: reduce_scatter
reduce_scatter     P -> S     S -> R: all_gather
shard              R -> S     S -> R: all_gather
copy_within        S -> S     S -> S: all_reduce_within (neighbours hold one head)
from_copies        S -> R     R -> S: to_copies (all ranks hold the only head; one copy gets it)
=================  =========  ==========================================================

``blocks`` are the global block sizes along ``dim`` (see ``ir.placement.Shard``); empty means one.
``size`` is the number of ranks along ``axis``: shapes then follow from the arguments alone.
"""

from __future__ import annotations

import math

import torch

from autoshard.ops.library import Traffic, define


def _nbytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()


def _scaled(x: torch.Tensor, dim: int, num: int, den: int) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] * num // den
    return x.new_empty(shape)


def pack_blocks(x: torch.Tensor, dim: int, blocks: list[int], size: int) -> torch.Tensor:
    """Return a whole ``x`` cut for ``size`` ranks and stacked: (size, *local shape)."""
    blocks = blocks or [x.shape[dim]]
    if len(set(blocks)) == 1:
        step = blocks[0] // size
        wide = x.unflatten(dim, (len(blocks), size, step)).movedim(dim + 1, 0)
        return wide.flatten(dim + 1, dim + 2).contiguous()
    per_block = [block.unflatten(dim, (size, -1)) for block in x.split(blocks, dim)]
    return torch.cat(per_block, dim + 1).movedim(dim, 0).contiguous()


def unpack_blocks(parts: torch.Tensor, dim: int, blocks: list[int]) -> torch.Tensor:
    """Return the whole value from ``parts`` (size, *local shape): inverse of ``pack_blocks``."""
    size = parts.shape[0]
    if len(blocks) > 1 and len(set(blocks)) > 1:
        pieces = parts.split([block // size for block in blocks], dim + 1)
        return torch.cat([p.movedim(0, dim).flatten(dim, dim + 1) for p in pieces], dim)
    count = max(len(blocks), 1)
    wide = parts.unflatten(dim + 1, (count, parts.shape[dim + 1] // count))
    return wide.movedim(0, dim + 1).flatten(dim, dim + 2)


# copy_to -------------------------------------------------------------------------------------
def _copy_to_backward(ctx, grad) -> tuple[torch.Tensor | None, ...]:
    return all_reduce(grad, ctx.axis), None


def _save_axis(ctx, inputs, output) -> None:
    ctx.axis = inputs[1]


copy_to = define(
    "copy_to(Tensor x, str axis) -> Tensor",
    fake=lambda x, axis: torch.empty_like(x),
    run=lambda comm, x, axis: x,
    backward=_copy_to_backward,
    setup=_save_axis,
)

# all_reduce ----------------------------------------------------------------------------------
all_reduce = define(
    "all_reduce(Tensor x, str axis) -> Tensor",
    fake=lambda x, axis: torch.empty_like(x, memory_format=torch.contiguous_format),
    run=lambda comm, x, axis: comm.all_reduce_start(x, axis).wait(),
    backward=lambda ctx, grad: (grad, None),
    setup=lambda ctx, inputs, output: None,
    traffic=lambda x, axis: (Traffic("all_reduce", axis, _nbytes(x)),),
)


# all_gather ----------------------------------------------------------------------------------
def _run_all_gather(comm, x, dim, blocks, axis, size, reduce_grad=False) -> torch.Tensor:
    return unpack_blocks(comm.all_gather_start(x.contiguous(), axis).wait(), dim, blocks)


def _save_shard(ctx, inputs, output) -> None:
    ctx.dim, ctx.blocks, ctx.axis, ctx.size = inputs[1:5]
    ctx.reduce_grad = inputs[5] if len(inputs) > 5 else False


def _all_gather_backward(ctx, grad) -> tuple[torch.Tensor | None, ...]:
    op = reduce_scatter if ctx.reduce_grad else shard
    return op(grad, ctx.dim, ctx.blocks, ctx.axis, ctx.size), None, None, None, None, None


all_gather = define(
    "all_gather(Tensor x, int dim, int[] blocks, str axis, int size, bool reduce_grad=False)"
    " -> Tensor",
    fake=lambda x, dim, blocks, axis, size, reduce_grad=False: _scaled(x, dim, size, 1),
    run=_run_all_gather,
    backward=_all_gather_backward,
    setup=_save_shard,
    traffic=lambda x, dim, blocks, axis, *rest: (Traffic("all_gather", axis, _nbytes(x)),),
)


# reduce_scatter ------------------------------------------------------------------------------
def _gather_backward(ctx, grad) -> tuple[torch.Tensor | None, ...]:
    return all_gather(grad, ctx.dim, ctx.blocks, ctx.axis, ctx.size), None, None, None, None


def _run_reduce_scatter(comm, x, dim, blocks, axis, size) -> torch.Tensor:
    return comm.reduce_scatter_start(pack_blocks(x, dim, blocks, size), axis).wait()


reduce_scatter = define(
    "reduce_scatter(Tensor x, int dim, int[] blocks, str axis, int size) -> Tensor",
    fake=lambda x, dim, blocks, axis, size: _scaled(x, dim, 1, size),
    run=_run_reduce_scatter,
    backward=_gather_backward,
    setup=_save_shard,
    traffic=lambda x, dim, blocks, axis, size: (Traffic("reduce_scatter", axis, _nbytes(x)),),
)


# shard ---------------------------------------------------------------------------------------
def _run_shard(comm, x, dim, blocks, axis, size) -> torch.Tensor:
    return pack_blocks(x, dim, blocks, size)[comm.index(axis)]


shard = define(
    "shard(Tensor x, int dim, int[] blocks, str axis, int size) -> Tensor",
    fake=lambda x, dim, blocks, axis, size: _scaled(x, dim, 1, size),
    run=_run_shard,
    backward=_gather_backward,
    setup=_save_shard,
)


# copies of one head on neighbouring ranks; the first ``own`` rows are each rank's own ----------
def _copy_within_backward(ctx, grad) -> tuple[torch.Tensor | None, ...]:
    return all_reduce_within(grad, ctx.times, ctx.axis, ctx.own), None, None, None


def _save_times(ctx, inputs, output) -> None:
    ctx.times, ctx.axis, ctx.own = inputs[1:]


def neighbours(index: int, times: int) -> tuple[int, ...]:
    """Return the coordinates of the ``times`` ranks that hold the same head as ``index``."""
    first = index // times * times
    return tuple(range(first, first + times))


copy_within = define(
    "copy_within(Tensor x, int times, str axis, int own=0) -> Tensor",
    fake=lambda x, times, axis, own=0: torch.empty_like(x),
    run=lambda comm, x, times, axis, own=0: x,
    backward=_copy_within_backward,
    setup=_save_times,
)


def _run_all_reduce_within(comm, x, times, axis, own=0) -> torch.Tensor:
    members = neighbours(comm.index(axis), times)
    if not own:
        return comm.all_reduce_start(x, axis, members=members).wait()
    rest = comm.all_reduce_start(x[own:].contiguous(), axis, members=members).wait()
    return torch.cat((x[:own], rest))


all_reduce_within = define(
    "all_reduce_within(Tensor x, int times, str axis, int own=0) -> Tensor",
    fake=lambda x, times, axis, own=0: torch.empty_like(x, memory_format=torch.contiguous_format),
    run=_run_all_reduce_within,
    traffic=lambda x, times, axis, own=0: (Traffic("all_reduce", axis, _nbytes(x[own:])),),
)


# the only head, a copy on every rank: each has the whole of it -----------------------------------
# Its gradient goes to one copy: all copies together are what the model's own head is. ``extent`` is
# that of the result along ``dim``, as the whole has one for each rank and a rank's part one.
def _resized(x: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
    if x.shape[dim] == extent:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return x.new_empty([*x.shape[:dim], extent, *x.shape[dim + 1 :]])


def _save_copies(ctx, inputs, output) -> None:
    x, ctx.dim, ctx.blocks, ctx.axis, ctx.size, _ = inputs
    ctx.extent = x.shape[ctx.dim]


def _to_copies_backward(ctx, grad) -> tuple[torch.Tensor | None, ...]:
    made = to_copies(grad, ctx.dim, ctx.blocks, ctx.axis, ctx.size, ctx.extent)
    return made, None, None, None, None, None


from_copies = define(
    "from_copies(Tensor x, int dim, int[] blocks, str axis, int size, int extent) -> Tensor",
    fake=lambda x, dim, blocks, axis, size, extent: _resized(x, dim, extent),
    run=lambda comm, x, *_: x,
    backward=_to_copies_backward,
    setup=_save_copies,
)
to_copies = define(
    "to_copies(Tensor x, int dim, int[] blocks, str axis, int size, int extent) -> Tensor",
    fake=lambda x, dim, blocks, axis, size, extent: _resized(x, dim, extent),
    run=lambda comm, x, dim, blocks, axis, *_: torch.zeros_like(x) if comm.index(axis) else x,
)

# start and wait halves, made by split-collectives ---------------------------------------------
# A start returns a fake of the *result's* shape; only `wait` may read it.
all_reduce_start = define(
    "all_reduce_start(Tensor x, str axis) -> Tensor",
    fake=lambda x, axis: torch.empty_like(x, memory_format=torch.contiguous_format),
    run=lambda comm, x, axis: comm.all_reduce_start(x, axis),
    traffic=lambda x, axis: (Traffic("all_reduce", axis, _nbytes(x)),),
)


class _Mapped:
    """A Work whose result is put in order after the wait."""

    def __init__(self, work, finish) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> torch.Tensor:
        return self._finish(self._work.wait())


def _run_all_gather_start(comm, x, dim, blocks, axis, size) -> _Mapped:
    work = comm.all_gather_start(x.contiguous(), axis)
    return _Mapped(work, lambda parts: unpack_blocks(parts, dim, blocks))


all_gather_start = define(
    "all_gather_start(Tensor x, int dim, int[] blocks, str axis, int size) -> Tensor",
    fake=lambda x, dim, blocks, axis, size: _scaled(x, dim, size, 1),
    run=_run_all_gather_start,
    traffic=lambda x, dim, blocks, axis, size: (Traffic("all_gather", axis, _nbytes(x)),),
)

reduce_scatter_start = define(
    "reduce_scatter_start(Tensor x, int dim, int[] blocks, str axis, int size) -> Tensor",
    fake=lambda x, dim, blocks, axis, size: _scaled(x, dim, 1, size),
    run=lambda comm, x, dim, blocks, axis, size: comm.reduce_scatter_start(
        pack_blocks(x, dim, blocks, size), axis
    ),
    traffic=lambda x, dim, blocks, axis, size: (Traffic("reduce_scatter", axis, _nbytes(x)),),
)

wait = define(
    "wait(Tensor started) -> Tensor",
    fake=lambda started: torch.empty_like(started),
    run=lambda comm, started: started.wait(),
)


# Tied parameters of several stages -------------------------------------------------------------
tied_all_reduce = define(
    "tied_all_reduce(Tensor x, str axis, int[] members) -> Tensor",
    fake=lambda x, axis, members: torch.empty_like(x),
    run=lambda comm, x, axis, members: comm.all_reduce_start(x, axis, members=members).wait(),
    traffic=lambda x, axis, members: (Traffic("all_reduce", axis, _nbytes(x), tuple(members)),),
)


STARTS = frozenset({all_reduce_start, all_gather_start, reduce_scatter_start})
# What moves a whole flat bucket and looks at nothing in it.
ON_BUCKETS = frozenset(
    {
        all_reduce,
        all_gather,
        reduce_scatter,
        all_reduce_start,
        all_gather_start,
        reduce_scatter_start,
        wait,
        tied_all_reduce,
    }
)


# Flat buckets ----------------------------------------------------------------------------------
def open_bucket(like: torch.Tensor, length: int, used: int, dtype=None) -> torch.Tensor:
    """Return a new bucket whose first ``used`` elements are still to be written."""
    flat = like.new_empty(length, dtype=dtype)
    flat[used:].zero_()
    return flat


def write_into(flat: torch.Tensor, offset: int, value: torch.Tensor) -> None:
    """Copy a gradient to its place in a bucket."""
    flat[offset : offset + value.numel()].view(value.shape).copy_(value)


def _run_pack(comm, values, length, dtype=None) -> torch.Tensor:
    flat = open_bucket(values[0], length, sum(value.numel() for value in values), dtype)
    offset = 0
    for value in values:
        write_into(flat, offset, value)
        offset += value.numel()
    return flat


pack = define(
    "pack(Tensor[] values, int length, ScalarType? dtype=None) -> Tensor",
    fake=lambda values, length, dtype=None: values[0].new_empty(length, dtype=dtype),
    run=_run_pack,
)


def _run_view_at(comm, flat, offset, shape) -> torch.Tensor:
    return flat[offset : offset + math.prod(shape)].view(shape)


view_at = define(
    "view_at(Tensor flat, int offset, int[] shape) -> Tensor",
    fake=lambda flat, offset, shape: flat.new_empty(shape),
    run=_run_view_at,
)


# Says where a gathered bucket dies: generated code deletes its name there. It returns nothing, so
# nobody reads it; it may not be swept away as unread.
release = define(
    "release(Tensor gathered) -> ()",
    fake=lambda gathered: None,
    run=lambda comm, gathered: None,
)
