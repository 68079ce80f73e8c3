"""The gradient norm of the whole model, every element counted once, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from autoshard.diagnostics import AutoshardError
from autoshard.ir import norm
from autoshard.ops.communicator import Communicator
from autoshard.runtime.layout import Slot
from autoshard.runtime.storage import Storage


def clip_grad_norm(
    storage: Storage,
    comm: Communicator,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; return the norm before.

    As torch's ``clip_grad_norm_`` on the plain model. The sum is taken in float64 in one order, so
    the result is equal bit for bit on all ranks. Every rank must call it.
    """
    total = grad_norm(storage, comm, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise AutoshardError(
            f"the norm of the gradients is {total.item()}: nothing was clipped",
            help="pass error_if_nonfinite=False to go on as torch does",
        )
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for parameter in storage.parameters.values():
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad))
    return total


def grad_norm(storage: Storage, comm: Communicator, norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients of the model, in the dtype that they promote to."""
    grads = list(_counted_here(storage, comm))
    is_max = math.isinf(norm_type)
    total = torch.zeros((), dtype=torch.float64, device=storage.device)
    for grad in grads:
        part = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64).to(total.device)
        total = torch.maximum(total, part) if is_max else total + part**norm_type
    for axis in norm.NORM_AXES:
        total = comm.all_reduce_start(total, axis, "max" if is_max else "sum").wait()
    return (total if is_max else total ** (1.0 / norm_type)).to(storage.layout.norm_dtype)


def _counted_here(storage: Storage, comm: Communicator) -> Iterator[torch.Tensor]:
    """Yield the gradients that this rank counts."""
    for fqn, parameter in storage.parameters.items():
        slot = storage.layout.slots[fqn]
        bucket = storage.layout.buckets[slot.bucket]
        if parameter.grad is None:
            continue
        grad = parameter.grad
        if not norm.counts_in_norm(slot.spec, bucket, comm.index, storage.stages):
            if not norm.counts_in_norm(slot.spec, bucket, comm.index, storage.stages, own=True):
                continue
            grad = _own_rows(storage, slot, grad)
        if grad.numel():
            yield grad


def _own_rows(storage: Storage, slot: Slot, grad: torch.Tensor) -> torch.Tensor:
    """Return what belongs to the rows before those that other ranks hold, too."""
    rows = slot.spec.copies.own_rows if slot.spec.copies else 0
    first, last = storage.own_range(slot)
    end = rows * math.prod(slot.shape[1:])
    return grad.reshape(-1)[: max(0, min(end, last) - first)]
