"""Gradients of one step: summed over micro-batches in flat buffers, then attached as ``.grad``."""

from __future__ import annotations

from collections.abc import Collection

import torch

from autoshard.diagnostics import InternalError
from autoshard.runtime.layout import Slot
from autoshard.runtime.storage import Storage, view

Key = tuple[int, str]  # (stage, bucket): a bucket of tied parameters has one sum for each stage


class Gradients:
    """The sums of one step.

    A first micro-batch is copied, later ones are added, in the order in which they come.
    """

    def __init__(self, storage: Storage, unreached: Collection[str] = ()) -> None:
        """Start from nothing: buffers are made when their first gradient comes.

        ``unreached`` parameters keep ``.grad`` as it is: the loss does not depend on them.
        """
        self._storage, self._unreached = storage, unreached
        self._sums: dict[Key, torch.Tensor] = {}
        self._written: dict[Key, set[str]] = {}
        self._shards: dict[Key, torch.Tensor] = {}
        self._results: dict[Key, torch.Tensor] = {}

    def add(self, stage: int, fqn: str, grad: torch.Tensor) -> None:
        """Add the gradient of a local parameter, not yet reduced over data parallel ranks."""
        slot = self._storage.layout.slots[fqn]
        key = (stage, slot.bucket)
        bucket = self._storage.layout.buckets[slot.bucket]
        if key not in self._sums:
            self._sums[key] = grad.new_empty(bucket.length)
            self._written[key] = set()
        target = view(self._sums[key], slot)
        if fqn in self._written[key]:
            target.add_(grad)
        else:
            target.copy_(grad)
            self._written[key].add(fqn)

    def add_shard(self, stage: int, bucket: str, shard: torch.Tensor) -> None:
        """Add this rank's shard of a bucket's gradient that the graph reduced already."""
        key = (stage, bucket)
        if key in self._shards:
            self._shards[key].add_(shard)
        else:
            self._shards[key] = shard

    def take_sum(self, stage: int, bucket: str) -> torch.Tensor:
        """Hand over the sum of a whole bucket, zero where no gradient came."""
        key = (stage, bucket)
        if key not in self._sums:
            info = self._storage.layout.buckets[bucket]
            return torch.zeros(info.length, dtype=info.dtype, device=self._storage.device)
        total = self._sums.pop(key)
        self._clear_gaps(total, bucket, self._written.pop(key))
        return total

    def take_shard(self, stage: int, bucket: str) -> torch.Tensor:
        """Hand over the sum of this rank's shards of a bucket."""
        shard = self._shards.pop((stage, bucket), None)
        if shard is None:
            raise InternalError(f"stage {stage} gave no gradient for bucket '{bucket}'")
        return shard

    def put(self, stage: int, bucket: str, reduced: torch.Tensor) -> None:
        """Take the reduced gradient of a bucket, laid out as the bucket is stored."""
        stored = self._storage.stored[bucket].numel()
        if reduced.numel() != stored:
            raise InternalError(
                f"the gradient of bucket '{bucket}' has {reduced.numel()} elements,"
                f" this rank stores {stored}"
            )
        self._results[stage, bucket] = reduced

    def attach(self) -> None:
        """Give every trainable parameter its gradient; add it where one is attached already."""
        for stage, bucket in [*self._sums]:
            self.put(stage, bucket, self.take_sum(stage, bucket))
        for stage, bucket in [*self._shards]:
            self.put(stage, bucket, self.take_shard(stage, bucket))
        for (_, bucket), result in sorted(self._results.items()):
            for slot in self._storage.layout.slots_of(bucket):
                self._attach(slot, result)

    def _attach(self, slot: Slot, result: torch.Tensor) -> None:
        if not slot.spec.requires_grad or slot.spec.fqn in self._unreached:
            return
        parameter = self._storage.parameters[slot.spec.fqn]
        grad = self._storage.own_part(result, slot)
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad.add_(grad)

    def _clear_gaps(self, total: torch.Tensor, bucket: str, written: set[str]) -> None:
        """Zero what no gradient was written to: padding, frozen and unreached parameters."""
        end = 0
        slots = sorted(self._storage.layout.slots_of(bucket), key=lambda slot: slot.offset)
        for slot in slots:
            if slot.spec.fqn in written:
                total[end : slot.offset].zero_()
                end = slot.offset + slot.numel
        total[end:].zero_()
