"""Faults of what the run-time does beside the graphs, planted while a program runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from autoshard.ir import norm
from autoshard.ir.params import ParamSpec
from autoshard.ir.program import Bucket
from autoshard.runtime import executor
from autoshard.runtime.gradients import Gradients
from autoshard.runtime.run import Run


@contextmanager
def clip_one_rank() -> Iterator[None]:
    """Clip by the norm of this rank's gradients alone."""
    with _patched(norm, "NORM_AXES", ()):
        yield


@contextmanager
def count_replicas() -> Iterator[None]:
    """Count a replicated parameter once for every rank that has it in the norm."""

    def everywhere(spec: ParamSpec, bucket: Bucket, *_: object, **options: object) -> bool:
        return True

    with _patched(norm, "counts_in_norm", everywhere):
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


@contextmanager
def take_first_microbatch() -> Iterator[None]:
    """Compute the first micro-batch's samples in place of each later one's."""
    start = executor.Run

    def again(made: Any, microbatches: Sequence[executor.Leaves], *rest: Any) -> Run:
        return start(made, [microbatches[0]] * len(microbatches), *rest)

    with _patched(executor, "Run", again):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager]] = {
    "clip-one-rank": clip_one_rank,
    "count-replicas": count_replicas,
    "overwrite-gradient": overwrite_gradient,
    "take-first-microbatch": take_first_microbatch,
}


@contextmanager
def _patched(owner: object, name: str, value: object) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)
