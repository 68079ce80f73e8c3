"""Faults of the run-time, planted while a program runs: only its numbers can show them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from autoshard.ops.communicator import Communicator
from autoshard.runtime import clip
from autoshard.runtime.gradients import Gradients
from autoshard.runtime.storage import Storage


@contextmanager
def clip_one_rank() -> Iterator[None]:
    """Clip by the norm of this rank's gradients alone."""

    def alone(storage: Storage, comm: Communicator, norm_type: float = 2.0) -> torch.Tensor:
        grads = [p.grad for p in storage.parameters.values() if p.grad is not None]
        return torch.stack([g.norm() for g in grads]).norm()

    with _patched(clip, "grad_norm", alone):
        yield


@contextmanager
def count_replicas() -> Iterator[None]:
    """Count a replicated parameter once for every rank that has it in the norm."""
    with _patched(clip, "_is_first", lambda spec, storage, comm: True):
        yield


@contextmanager
def overwrite_gradient() -> Iterator[None]:
    """Keep the last micro-batch's gradient instead of the sum."""
    add, add_shard = Gradients.add, Gradients.add_shard

    def overwrite(self: Gradients, stage: int, fqn: str, grad: torch.Tensor) -> None:
        for written in self._written.values():
            written.discard(fqn)
        add(self, stage, fqn, grad)

    def overwrite_shard(self: Gradients, stage: int, bucket: str, shard: torch.Tensor) -> None:
        self._shards.pop((stage, bucket), None)
        add_shard(self, stage, bucket, shard)

    with (
        _patched(Gradients, "add", overwrite),
        _patched(Gradients, "add_shard", overwrite_shard),
    ):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager]] = {
    "clip-one-rank": clip_one_rank,
    "count-replicas": count_replicas,
    "overwrite-gradient": overwrite_gradient,
}


@contextmanager
def _patched(owner: object, name: str, value: object) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)
