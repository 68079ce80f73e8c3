"""Embedding and cross entropy over a vocabulary that is split over the ranks of a mesh axis.

Both are single nodes: what they compute over all ranks together is one embedding and one cross
entropy, and no rank ever holds all logits. With V the true vocabulary, P its padded size, n ranks:

    y = vocab_embedding(weight[P/n, D], indices[...])         y[..., D] is this rank's partial sum
    loss, lse = vocab_cross_entropy(logits[N, P/n], target[N])  both [N], the same on all ranks

    lse_i  = log sum_v exp(logit_iv)                            over v < V
    loss_i = lse_i - (1 - s) logit_i,target - s/V sum_v logit_iv     (s: label smoothing)

and 0 where the target is ``ignore_index``. Columns V..P-1 are padding: they carry no weight and get
no gradient. The forward costs two all_reduces of N and 2N (3N with smoothing) numbers, the backward
none. Source of the idea: Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.ops.communicator import Communicator
from autoshard.ops.library import Traffic, define
from autoshard.ops.norm_checks import statistics_dtype


# Embedding -----------------------------------------------------------------------------------
def owned_indices(
    comm: Communicator, indices: Tensor, rows: int, axis: str
) -> tuple[Tensor, Tensor]:
    """Return the indices counted from this rank's first row, and which of them it owns."""
    local = indices - comm.index(axis) * rows
    return local, (local >= 0) & (local < rows)


def _run_embedding(
    comm: Communicator, weight: Tensor, indices: Tensor, axis: str, size: int, padding_idx: int = -1
) -> Tensor:
    local, owned = owned_indices(comm, indices, weight.shape[0], axis)
    found = F.embedding(local.where(owned, 0), weight)
    return found.masked_fill(~owned.unsqueeze(-1), 0)


def _run_embedding_backward(
    comm: Communicator,
    grad: Tensor,
    indices: Tensor,
    rows: int,
    axis: str,
    size: int,
    padding_idx: int = -1,
) -> Tensor:
    local, owned = owned_indices(comm, indices, rows, axis)
    owned = owned & (indices != padding_idx)
    kept = grad.masked_fill(~owned.unsqueeze(-1), 0)
    # Rows that this rank does not own add their zeros to row 0.
    return torch.ops.aten.embedding_dense_backward(kept, local.where(owned, 0), rows, -1, False)


def _save_embedding(ctx: Any, inputs: tuple, output: Tensor) -> None:
    weight, indices, ctx.axis, ctx.size, *rest = inputs
    ctx.padding_idx = rest[0] if rest else -1
    ctx.rows = weight.shape[0]
    ctx.save_for_backward(indices)


def _embedding_backward(ctx: Any, grad: Tensor) -> tuple:
    (indices,) = ctx.saved_tensors
    weight_grad = vocab_embedding_backward(
        grad, indices, ctx.rows, ctx.axis, ctx.size, ctx.padding_idx
    )
    return weight_grad, None, None, None, None


vocab_embedding = define(
    "vocab_embedding(Tensor weight, Tensor indices, str axis, int size, int padding_idx=-1)"
    " -> Tensor",
    fake=lambda weight, indices, axis, size, padding_idx=-1: weight.new_empty(
        (*indices.shape, weight.shape[1])
    ),
    run=_run_embedding,
    backward=_embedding_backward,
    setup=_save_embedding,
)

vocab_embedding_backward = define(
    "vocab_embedding_backward(Tensor grad, Tensor indices, int rows, str axis, int size,"
    " int padding_idx=-1) -> Tensor",
    fake=lambda grad, indices, rows, axis, size, padding_idx=-1: grad.new_empty(
        (rows, grad.shape[-1])
    ),
    run=_run_embedding_backward,
)


# Cross entropy -------------------------------------------------------------------------------
def real_columns(comm: Communicator, logits: Tensor, axis: str, classes: int) -> Tensor:
    """Return which local columns are vocabulary and not padding, as [P/n]."""
    columns = torch.arange(logits.shape[-1], device=logits.device)
    return columns + comm.index(axis) * logits.shape[-1] < classes


def _run_cross_entropy(
    comm: Communicator,
    logits: Tensor,
    target: Tensor,
    axis: str,
    size: int,
    classes: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    real = real_columns(comm, logits, axis, classes)
    wide = logits.to(statistics_dtype(logits.dtype))
    peak = wide.masked_fill(~real, -torch.inf).amax(-1)
    peak = comm.all_reduce_start(peak, axis, op="max").wait()
    shifted = wide - peak.unsqueeze(-1)
    local, owned = owned_indices(comm, target, logits.shape[-1], axis)
    picked = shifted.gather(-1, local.where(owned, 0).unsqueeze(-1)).squeeze(-1)
    terms = [shifted.exp().masked_fill(~real, 0).sum(-1), picked.masked_fill(~owned, 0)]
    if label_smoothing:
        terms.append(shifted.masked_fill(~real, 0).sum(-1))
    total = comm.all_reduce_start(torch.stack(terms), axis).wait()
    log_sum = total[0].log()
    loss = log_sum - (1 - label_smoothing) * total[1]
    if label_smoothing:
        loss = loss - label_smoothing / classes * total[2]
    return loss.masked_fill(target == ignore_index, 0).to(logits.dtype), log_sum + peak


def _run_cross_entropy_backward(
    comm: Communicator,
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    axis: str,
    size: int,
    classes: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    real = real_columns(comm, logits, axis, classes)
    wide = logits.to(lse.dtype)
    local, owned = owned_indices(comm, target, logits.shape[-1], axis)
    slope = (wide - lse.unsqueeze(-1)).exp() - label_smoothing / classes
    # In slope's type from the start: 0.9 rounded to float32 would be 2e-8 off.
    hit = (owned.to(slope.dtype) * (label_smoothing - 1.0)).unsqueeze(-1)
    slope = slope.scatter_add(-1, local.where(owned, 0).unsqueeze(-1), hit)
    kept = grad.to(lse.dtype).masked_fill(target == ignore_index, 0).unsqueeze(-1)
    return (slope * kept).masked_fill(~real, 0).to(logits.dtype)


def _save_cross_entropy(ctx: Any, inputs: tuple, output: tuple) -> None:
    logits, target, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, target, output[1])


def _cross_entropy_backward(ctx: Any, grad: Tensor, _: Any) -> tuple:
    logits, target, lse = ctx.saved_tensors
    slope = vocab_cross_entropy_backward(grad, logits, target, lse, *ctx.rest)
    return slope, *(None,) * (len(ctx.rest) + 1)


def _cross_entropy_traffic(
    logits: Tensor,
    target: Tensor,
    axis: str,
    size: int,
    classes: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[Traffic, ...]:
    nbytes = target.numel() * statistics_dtype(logits.dtype).itemsize
    terms = 3 if label_smoothing else 2
    return (
        Traffic("all_reduce", axis, nbytes),
        Traffic("all_reduce", axis, terms * nbytes),
    )


vocab_cross_entropy = define(
    "vocab_cross_entropy(Tensor logits, Tensor target, str axis, int size, int classes,"
    " int ignore_index=-100, float label_smoothing=0.0) -> (Tensor, Tensor)",
    fake=lambda logits, target, *rest: (
        logits.new_empty(target.shape),
        logits.new_empty(target.shape, dtype=statistics_dtype(logits.dtype)),
    ),
    run=_run_cross_entropy,
    backward=_cross_entropy_backward,
    setup=_save_cross_entropy,
    traffic=_cross_entropy_traffic,
)

vocab_cross_entropy_backward = define(
    "vocab_cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor lse, str axis,"
    " int size, int classes, int ignore_index=-100, float label_smoothing=0.0) -> Tensor",
    fake=lambda grad, logits, target, lse, *rest: torch.empty_like(logits),
    run=_run_cross_entropy_backward,
)
