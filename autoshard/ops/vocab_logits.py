"""Reductions of logits whose last dimension is split over the ranks of a mesh axis.

What losses other than a plain cross entropy are made of: with V the true vocabulary, P its padded
size, n ranks,

    lse = vocab_logsumexp(logits[..., P/n])       lse[...], the same on all ranks, over v < V
    y = vocab_gather(values[..., P/n], i[..., K])   y[..., K] is this rank's partial sum

A log-softmax is then ``logits - lse``, a softmax its exponential. Padding columns carry no weight
and get no gradient. The logsumexp costs two all_reduces of one number a row, its backward none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoshard.ops.communicator import Communicator
from autoshard.ops.library import Traffic, define
from autoshard.ops.norm_checks import statistics_dtype
from autoshard.ops.vocab import owned_indices, real_columns


# Logsumexp -----------------------------------------------------------------------------------
def _run_logsumexp(
    comm: Communicator, logits: Tensor, axis: str, size: int, classes: int
) -> Tensor:
    padding = ~real_columns(comm, logits, axis, classes)
    wide = logits.to(statistics_dtype(logits.dtype)).masked_fill(padding, -torch.inf)
    peak = comm.all_reduce_start(wide.amax(-1), axis, op="max").wait()
    total = (wide - peak.unsqueeze(-1)).exp().sum(-1)
    return comm.all_reduce_start(total, axis).wait().log() + peak


def _run_logsumexp_backward(
    comm: Communicator,
    grad: Tensor,
    logits: Tensor,
    lse: Tensor,
    axis: str,
    size: int,
    classes: int,
) -> Tensor:
    chance = (logits.to(lse.dtype) - lse.unsqueeze(-1)).exp()
    slope = chance * grad.to(lse.dtype).unsqueeze(-1)
    real = real_columns(comm, logits, axis, classes)
    return slope.masked_fill(~real, 0).to(logits.dtype)


def _save_logsumexp(ctx: Any, inputs: tuple, output: Tensor) -> None:
    logits, *ctx.rest = inputs
    ctx.save_for_backward(logits, output)


def _logsumexp_backward(ctx: Any, grad: Tensor) -> tuple:
    return vocab_logsumexp_backward(grad, *ctx.saved_tensors, *ctx.rest), None, None, None


def _logsumexp_traffic(logits: Tensor, axis: str, *rest: object) -> tuple[Traffic, ...]:
    rows = logits.numel() // max(logits.shape[-1], 1)
    nbytes = rows * statistics_dtype(logits.dtype).itemsize
    return (Traffic("all_reduce", axis, nbytes),) * 2


vocab_logsumexp = define(
    "vocab_logsumexp(Tensor logits, str axis, int size, int classes) -> Tensor",
    fake=lambda logits, *rest: logits.new_empty(
        logits.shape[:-1], dtype=statistics_dtype(logits.dtype)
    ),
    run=_run_logsumexp,
    backward=_logsumexp_backward,
    setup=_save_logsumexp,
    traffic=_logsumexp_traffic,
)

vocab_logsumexp_backward = define(
    "vocab_logsumexp_backward(Tensor grad, Tensor logits, Tensor lse, str axis, int size,"
    " int classes) -> Tensor",
    fake=lambda grad, logits, *rest: torch.empty_like(logits),
    run=_run_logsumexp_backward,
)


# Gather --------------------------------------------------------------------------------------
def _run_gather(comm: Communicator, values: Tensor, index: Tensor, axis: str, size: int) -> Tensor:
    local, owned = owned_indices(comm, index, values.shape[-1], axis)
    return values.gather(-1, local.where(owned, 0)).masked_fill(~owned, 0)


def _run_gather_backward(
    comm: Communicator, grad: Tensor, index: Tensor, columns: int, axis: str, size: int
) -> Tensor:
    local, owned = owned_indices(comm, index, columns, axis)
    kept = grad.masked_fill(~owned, 0)
    return grad.new_zeros((*grad.shape[:-1], columns)).scatter_add(-1, local.where(owned, 0), kept)


def _save_gather(ctx: Any, inputs: tuple, output: Tensor) -> None:
    values, index, *ctx.rest = inputs
    ctx.columns = values.shape[-1]
    ctx.save_for_backward(index)


def _gather_backward(ctx: Any, grad: Tensor) -> tuple:
    (index,) = ctx.saved_tensors
    return vocab_gather_backward(grad, index, ctx.columns, *ctx.rest), None, None, None


vocab_gather = define(
    "vocab_gather(Tensor values, Tensor index, str axis, int size) -> Tensor",
    fake=lambda values, index, *rest: values.new_empty(index.shape),
    run=_run_gather,
    backward=_gather_backward,
    setup=_save_gather,
)

vocab_gather_backward = define(
    "vocab_gather_backward(Tensor grad, Tensor index, int columns, str axis, int size) -> Tensor",
    fake=lambda grad, index, columns, *rest: grad.new_empty((*grad.shape[:-1], columns)),
    run=_run_gather_backward,
)
