"""Gradients of one step: summed over micro-batches in flat buffers, then attached as ``.grad``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from autoshard.diagnostics import InternalError
from autoshard.runtime.storage import Storage

Key = tuple[int, str]  # (stage, bucket): a bucket of tied parameters has one sum for each stage


class Gradients:
    """The sums of one step.

    A first micro-batch is copied, later ones are added, in the order in which they come. Stages
    that share a tied parameter have sums of their own, which are added in stage order at the end:
    the result does not depend on how a schedule mixes the stages of a rank.
    """

    def __init__(self, storage: Storage, unreached: Collection[str] = ()) -> None:
        """Start from nothing: buffers are made when their first gradient comes.

        ``unreached`` parameters keep ``.grad`` as it is: the loss does not depend on them.
        """
        self._storage, self._unreached = storage, unreached
        self._sums: dict[Key, torch.Tensor] = {}
        self._views: dict[tuple[int, str], torch.Tensor] = {}  # by (stage, parameter)
        self._written: dict[Key, set[str]] = {}
        self._shards: dict[Key, torch.Tensor] = {}
        self._results: dict[str, torch.Tensor] = {}  # by bucket
        self._on_host: dict[str, torch.Tensor] = {}  # copies of results, for offloaded buckets

    def add(self, stage: int, fqn: str, grad: torch.Tensor) -> None:
        """Add the gradient of a local parameter, not yet reduced over data parallel ranks."""
        key = (stage, self._storage.layout.slots[fqn].bucket)
        if key not in self._sums:
            self._open(key, grad)
        target, written = self._views[stage, fqn], self._written[key]
        if fqn in written:
            target.add_(grad)
        else:
            target.copy_(grad)
            written.add(fqn)

    def add_shard(self, stage: int, bucket: str, shard: torch.Tensor) -> None:
        """Add this rank's shard of a bucket's gradient that the graph reduced already."""
        key = (stage, bucket)
        if key in self._shards:
            self._shards[key].add_(shard)
        else:
            dtype = self._storage.layout.buckets[bucket].grad_dtype
            self._shards[key] = shard.to(dtype)

    def take_sum(self, bucket: str) -> torch.Tensor:
        """Hand over the sum of a whole bucket, zero where no gradient came."""
        keys = _of_bucket(self._sums, bucket)
        if not keys:
            info = self._storage.layout.buckets[bucket]
            return torch.zeros(info.length, dtype=info.grad_dtype, device=self._storage.device)
        for key in keys:
            self._close(key)
        return _added(self._sums, keys)

    def take_shard(self, bucket: str) -> torch.Tensor:
        """Hand over the sum of this rank's shards of a bucket.

        Zero where all gradients of a tied parameter come from stages of other ranks.
        """
        keys = _of_bucket(self._shards, bucket)
        info = self._storage.layout.buckets[bucket]
        if not keys and info.tied_stages:
            length = self._storage.stored[bucket].numel()
            return torch.zeros(length, dtype=info.grad_dtype, device=self._storage.device)
        if not keys:
            raise InternalError(f"no stage of this rank gave a gradient for bucket '{bucket}'")
        return _added(self._shards, keys)

    def put(self, bucket: str, reduced: torch.Tensor) -> None:
        """Take the reduced gradient of a bucket, laid out as the bucket is stored."""
        stored = self._storage.stored[bucket].numel()
        if reduced.numel() != stored:
            raise InternalError(
                f"the gradient of bucket '{bucket}' has {reduced.numel()} elements,"
                f" this rank stores {stored}"
            )
        info, host = self._storage.layout.buckets[bucket], self._storage.host
        result = self._results[bucket] = reduced.to(info.dtype)
        if host is not None and info.on_host:
            self._on_host[bucket] = host.take(result)

    def finish(self) -> list[torch.Tensor]:
        """Return the whole step's gradients, in the order of ``attach``."""
        for bucket in sorted({bucket for _, bucket in self._sums}):
            self.put(bucket, self.take_sum(bucket))
        for bucket in sorted({bucket for _, bucket in self._shards}):
            self.put(bucket, self.take_shard(bucket))
        return [self._results[bucket] for bucket in sorted(self._results)]

    def attach(self, factor: float = 1.0) -> None:
        """Give every trainable parameter its gradient; add it where one is attached already."""
        self.finish()
        host = self._storage.host
        if host is not None and self._on_host:
            host.settle()
        for bucket, result in sorted((self._results | self._on_host).items()):
            if factor != 1.0:
                result.mul_(factor)
            for fqn, grad in self._storage.own[bucket].views(result).items():
                parameter = self._storage.parameters[fqn]
                if not parameter.requires_grad or fqn in self._unreached:
                    continue
                if parameter.grad is None:
                    parameter.grad = grad
                else:
                    parameter.grad.add_(grad)

    def _open(self, key: Key, like: torch.Tensor) -> None:
        """Make the buffer of a sum, and a view of it for each parameter."""
        stage, name = key
        bucket = self._storage.layout.buckets[name]
        flat = self._sums[key] = like.new_empty(bucket.length, dtype=bucket.grad_dtype)
        self._written[key] = set()
        for fqn, target in self._storage.whole[name].views(flat).items():
            self._views[stage, fqn] = target

    def _close(self, key: Key) -> None:
        """Zero what no gradient was written to: padding, frozen and unreached parameters."""
        (stage, name), written = key, self._written.pop(key)
        pieces = self._storage.whole[name]
        pieces.clear_gaps(self._sums[key])
        for fqn, _, _ in pieces.places:
            target = self._views.pop((stage, fqn))
            if fqn not in written:
                target.zero_()


def _of_bucket(sums: Mapping[Key, torch.Tensor], bucket: str) -> list[Key]:
    return sorted(key for key in sums if key[1] == bucket)


def _added(sums: dict[Key, torch.Tensor], keys: Sequence[Key]) -> torch.Tensor:
    """Take the sums of several stages out and return them added in stage order."""
    total = sums.pop(keys[0])
    for key in keys[1:]:
        total = total.add_(sums.pop(key))
    return total
