"""Flat buffers: what a rank stores of the model, and the parameters it hands out as views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from autoshard.ir.params import ParamSpec
from autoshard.ir.placement import Shard, take_shard
from autoshard.ir.program import Bucket, Program
from autoshard.ops.communicator import Communicator
from autoshard.runtime.layout import Layout, Slot, plan_layout
from autoshard.runtime.loss_scale import LossScaler
from autoshard.runtime.offload import HostMemory


class Place(Communicator, Protocol):
    """A communicator that knows the device its rank computes on."""

    device: torch.device
    host: HostMemory | None  # None where the device's memory is the host's


@dataclass(frozen=True)
class Pieces:
    """How a flat buffer falls apart into parameters, with gaps that belong to none.

    One split makes all views: a step must not spend Python's time on every parameter.
    """

    lengths: tuple[int, ...]  # of parameters and gaps, from the first element to the last
    places: tuple[tuple[str, int, tuple[int, ...]], ...]  # (parameter, number of its piece, shape)
    gaps: tuple[int, ...]  # numbers of the pieces between

    @classmethod
    def of(
        cls, names: Sequence[str], ranges: Sequence[tuple[int, int, tuple[int, ...]]], total: int
    ) -> Pieces:
        """Cut ``total`` elements at (offset, length, shape) of each parameter, given in order."""
        lengths: list[int] = []
        places: list[tuple[str, int, tuple[int, ...]]] = []
        gaps: list[int] = []
        end = 0
        for name, (offset, length, shape) in zip(names, ranges, strict=True):
            if offset > end:
                gaps.append(len(lengths))
                lengths.append(offset - end)
            places.append((name, len(lengths), shape))
            lengths.append(length)
            end = offset + length
        if total > end:
            gaps.append(len(lengths))
            lengths.append(total - end)
        return cls(tuple(lengths), tuple(places), tuple(gaps))

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each parameter's view of ``flat``."""
        parts = flat.split_with_sizes(self.lengths)
        return {name: parts[number].view(shape) for name, number, shape in self.places}

    def clear_gaps(self, flat: torch.Tensor) -> None:
        """Zero what belongs to no parameter."""
        if self.gaps:
            parts = flat.split_with_sizes(self.lengths)
            for number in self.gaps:
                parts[number].zero_()


class Storage:
    """The parameters and buffers of one rank.

    A bucket is stored whole, or as this rank's shard of it; the whole of a cut bucket comes and
    goes with ``gathered``. Handed-out parameters are views of what is stored: of the parameter's
    own (tensor-parallel) shape where the bucket is whole, 1-D and perhaps empty where it is cut.
    Offloaded buckets lie in host memory; ``send`` copies them to the device for each step.
    """

    def __init__(self, program: Program, comm: Place, stages: tuple[int, ...]) -> None:
        """Allocate every bucket of ``stages``; fill it with ``write``."""
        self._comm, self.mesh, self.params = comm, program.mesh, program.params
        self.device, self.host = comm.device, comm.host
        self.stages = stages
        self.layout: Layout = plan_layout(program, stages)
        self.stored: dict[str, torch.Tensor] = {
            name: self._zeros(b, b.dtype) for name, b in self.layout.buckets.items()
        }
        self.narrow: dict[str, torch.Tensor] = {  # offloaded buckets as phases read them
            name: self._zeros(b, b.read_dtype)
            for name, b in self.layout.buckets.items()
            if b.on_host and b.read_dtype != b.dtype
        }
        self.gathered: dict[str, torch.Tensor] = {}
        self.live: dict[str, torch.Tensor] = {}  # parameters of gathered buckets, as views
        self.version = 0  # changes with what stays at one place otherwise
        self.buffers: dict[str, torch.Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {
            fqn: nn.Parameter(self.stored_view(slot), requires_grad=slot.spec.requires_grad)
            for fqn, slot in self.layout.slots.items()
        }
        self._views: dict[str, torch.Tensor] = {}
        self.whole = {name: self._pieces(name, True) for name in self.layout.buckets}
        self.own = {name: self._pieces(name, False) for name in self.layout.buckets}
        self.scaler = LossScaler.of(program.precision)

    def param(self, fqn: str) -> torch.Tensor:
        """Return the local parameter to compute with; a cut bucket must be gathered."""
        if fqn in self._views:
            return self._views[fqn]
        slot = self.layout.slots[fqn]
        if not self.is_fixed(fqn):
            return self.live[fqn]
        self._views[fqn] = view(self.stored[slot.bucket], slot)
        return self._views[fqn]

    def gather(self, name: str, whole: torch.Tensor) -> None:
        """Take the whole of a bucket, until it is released."""
        self.gathered[name] = whole
        self.live |= self.whole[name].views(whole)

    def release(self, name: str) -> None:
        """Let go of the whole of a bucket."""
        if self.gathered.pop(name, None) is not None:
            for fqn, _, _ in self.whole[name].places:
                del self.live[fqn]

    def arrive(self, name: str) -> None:
        """Make sure that a bucket which lies on the host is on the device, until ``clear``."""
        if name not in self.gathered:
            self.gather(name, self.flat(name))

    def clear(self) -> None:
        """Let go of all that a step gathered."""
        self.gathered.clear()
        self.live.clear()

    def is_fixed(self, fqn: str) -> bool:
        """Tell whether a parameter is computed with as it is stored, always at one place."""
        bucket = self.layout.buckets[self.layout.slots[fqn].bucket]
        is_gathered = bucket.axis is not None or bucket.read_dtype != bucket.dtype
        return not is_gathered and not self.is_sent(bucket.name)

    def is_sent(self, name: str) -> bool:
        """Tell whether a bucket is copied from the host to the device in each step."""
        return self.host is not None and self.layout.buckets[name].on_host

    @property
    def away(self) -> tuple[str, ...]:
        """Return the buckets that lie in host memory; none where the device's is the host's."""
        buckets = self.layout.buckets if self.host is not None else {}
        return tuple(name for name, bucket in buckets.items() if bucket.on_host)

    def send(self) -> None:
        """Start to copy offloaded buckets to the device: the optimizer has changed them."""
        for name, narrow in self.narrow.items():
            narrow.copy_(self.stored[name])
        if self.host is not None:
            kept = [name for name in self.away if not self.layout.buckets[name].is_fetched]
            self.host.send({name: self._flat(name) for name in kept})

    def flat(self, name: str) -> torch.Tensor:
        """Return a stored bucket for phases to gather: on the device, but for fetched ones."""
        if self.host is None or not self.is_sent(name) or self.layout.buckets[name].is_fetched:
            return self._flat(name)
        return self.host.copy_of(name)

    def _flat(self, name: str) -> torch.Tensor:
        return self.narrow.get(name, self.stored[name])

    def buffer(self, fqn: str) -> torch.Tensor:
        """Return the local buffer to compute with."""
        if fqn not in self._views:
            self._views[fqn] = localize(self.buffers[fqn], self.params[fqn], self._comm)
        return self._views[fqn]

    def stored_view(self, slot: Slot) -> torch.Tensor:
        """Return the part of a parameter that this rank stores, as a view."""
        return self.own_part(self.stored[slot.bucket], slot)

    def own_part(self, flat: torch.Tensor, slot: Slot) -> torch.Tensor:
        """Return this rank's part of a parameter out of ``flat``, which is laid out as stored."""
        if self.layout.buckets[slot.bucket].axis is None:
            return view(flat, slot)
        first, last = self.own_range(slot)
        start = self.shard_start(self.layout.buckets[slot.bucket])
        return flat[slot.offset + first - start : slot.offset + last - start]

    def own_range(self, slot: Slot) -> tuple[int, int]:
        """Return which elements of the local parameter this rank stores (first, past the last)."""
        bucket = self.layout.buckets[slot.bucket]
        start = self.shard_start(bucket)
        stop = start + self._stored_length(bucket)
        # An empty part is kept inside the shard: its place is where the parameter would begin.
        first = min(max(slot.offset, start), stop)
        last = min(max(slot.offset + slot.numel, start), stop)
        return first - slot.offset, last - slot.offset

    def shard_start(self, bucket: Bucket) -> int:
        """Return where in the bucket the part begins that this rank stores."""
        return self._comm.index(bucket.axis) * self._stored_length(bucket) if bucket.axis else 0

    def write(self, fqn: str, value: torch.Tensor) -> None:
        """Store a parameter or buffer, given whole: global, in the shape of the user's model.

        Parameters of other stages are left out; buffers and what no stage uses are kept whole.
        """
        spec = self.params[fqn]
        if spec.is_buffer or not spec.homes:
            self.buffers[fqn] = value.detach().to(self.device, copy=True)
            self._views.pop(fqn, None)
            self.version += 1
        if fqn not in self.layout.slots:
            return
        slot = self.layout.slots[fqn]
        local = localize(value.detach(), slot.spec, self._comm).reshape(-1)
        first, last = self.own_range(slot)
        with torch.no_grad():
            self.stored_view(slot).view(-1).copy_(local[first:last])

    def drop_gradients(self) -> None:
        """Leave no gradient on any parameter: an optimizer's step then does nothing."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def stepped(self) -> None:
        """Note that the optimizer has made its step."""
        if self.scaler is not None:
            self.scaler.stepped()

    def nbytes(self) -> int:
        """Return the bytes that this rank keeps between steps, gradients not counted."""
        kept = [*self.stored.values(), *self.gathered.values(), *self.buffers.values()]
        return sum(t.numel() * t.element_size() for t in kept)

    def _zeros(self, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
        length = self._stored_length(bucket)
        if self.host is not None and bucket.on_host:
            return self.host.zeros(length, dtype)
        return torch.zeros(length, dtype=dtype, device=self.device)

    def _pieces(self, name: str, is_whole: bool) -> Pieces:
        """Return how a bucket, or this rank's part of it, falls apart."""
        bucket = self.layout.buckets[name]
        slots = sorted(self.layout.slots_of(name), key=lambda slot: slot.offset)
        if is_whole or bucket.axis is None:
            ranges = [(slot.offset, slot.numel, slot.shape) for slot in slots]
            return Pieces.of([s.spec.fqn for s in slots], ranges, bucket.length)
        start = self.shard_start(bucket)
        ends = [(slot.offset - start, *self.own_range(slot)) for slot in slots]
        parts = [(at + first, last - first, (last - first,)) for at, first, last in ends]
        return Pieces.of([s.spec.fqn for s in slots], parts, self._stored_length(bucket))

    def _stored_length(self, bucket: Bucket) -> int:
        return bucket.length // (self.mesh.size(bucket.axis) if bucket.axis else 1)


def view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Return a parameter as a view of its whole bucket."""
    return flat[slot.offset : slot.offset + slot.numel].view(slot.shape)


def localize(value: torch.Tensor, spec: ParamSpec, comm: Communicator) -> torch.Tensor:
    """Return this rank's part of a global value: padded with zeros, then cut over the axes."""
    value = spec.pad(value)
    for axis, placement in spec.placements.items():
        if isinstance(placement, Shard):
            value = take_shard(value, placement, comm.index(axis), comm.size(axis))
    return value
