"""Where a local value's elements lie in the global one, as the few numbers that kernels take.

A local value is ``count`` stretches of ``length`` neighbouring elements; stretch i begins at global
index ``sample * sample_elements + first + i * stride``.  That covers values that are whole or split
along one dimension in one block; any other split is drawn by the reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from autoshard.ops import native
from autoshard.ops.communicator import Communicator
from autoshard.ops.philox import keep_threshold

if TYPE_CHECKING:
    from autoshard.ops.dropout import DropoutArgs


@dataclass(frozen=True)
class Runs:
    """The stretches of one local value; see the module."""

    count: int
    length: int
    sample_elements: int
    first: int = 0
    stride: int = 0


def find_runs(args: DropoutArgs, comm: Communicator) -> Runs | None:
    """Return the stretches of ``args.x``, or None where they have no such form."""
    shape, batch = tuple(args.x.shape), args.batch_dim
    if any(size != 1 for size in shape[: max(batch, 0)]):
        return None
    of_sample = math.prod(shape[batch + 1 :]) * args.rows if batch >= 0 else 0
    if not args.dims:
        return Runs(1, math.prod(shape), of_sample)
    if len(args.dims) > 1 or args.counts[0] > 1 or args.dims[0] <= batch:
        return None
    dim, size = args.dims[0], args.sizes[0]
    length = math.prod(shape[dim:])
    first = comm.index(args.axes[0]) * length
    return Runs(math.prod(shape[:dim]), length, of_sample * size, first, length * size)


def row_keys(args: DropoutArgs, comm: Communicator, hidden: int) -> Any:
    """Return the keys for a kernel that works on rows of ``hidden`` elements, or None.

    None means that there is no kernel for this value and the reference must draw the mask.
    """
    runs = find_runs(args, comm) if has_kernel(args) else None
    if runs is None or runs.length % hidden:
        return None
    return _keys(args, runs, runs.length // hidden)


def run_kernel(args: DropoutArgs, comm: Communicator) -> torch.Tensor | None:
    """Return the dropout of ``args.x`` by the compiled kernel, or None where there is none."""
    runs = find_runs(args, comm) if has_kernel(args) else None
    if runs is None:
        return None
    return native.dropout(args.x, runs.count, runs.length, _keys(args, runs, 1))


def has_kernel(args: DropoutArgs) -> bool:
    """Return whether a compiled kernel can read these tensors."""
    x, rng = args.x, args.rng
    return native.has_kernel(x) and rng.device == x.device and rng.is_contiguous()


def _keys(args: DropoutArgs, runs: Runs, rows: int) -> Any:
    return native.module_of(args.x).Dropout(
        _scale(args.p),
        keep_threshold(args.p),
        args.site & 0xFFFFFFFF,
        args.rng.data_ptr(),
        runs.sample_elements,
        runs.first,
        rows,
        runs.stride,
    )


@cache
def _scale(p: float) -> float:
    # In float32 from the start, so that the bits are those of the reference.
    return float(torch.ones((), dtype=torch.float32) / (1.0 - p))
