"""Where each parameter of one rank lies: bucket, offset, shape; and the part the rank stores."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

import torch

from autoshard.diagnostics import InternalError
from autoshard.ir.params import Flat, ParamSpec
from autoshard.ir.program import Bucket, Program
from autoshard.mesh import Mesh
from autoshard.schedule import Schedule


@dataclass(frozen=True)
class Slot:
    """One parameter in its bucket: elements ``offset`` to ``offset + numel``."""

    spec: ParamSpec
    bucket: str
    offset: int
    shape: tuple[int, ...]  # local: what the rank computes with

    @property
    def numel(self) -> int:
        """Return the number of elements of the local parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The buckets and parameters of one rank."""

    buckets: dict[str, Bucket]
    slots: dict[str, Slot]  # by canonical name, in the model's order
    norm_dtype: torch.dtype  # of the gradients' norm: the same on all ranks, whatever they hold

    def slots_of(self, bucket: str) -> tuple[Slot, ...]:
        """Return the parameters of a bucket, in the model's order."""
        return tuple(slot for slot in self.slots.values() if slot.bucket == bucket)


def scheduled(program: Program) -> Schedule:
    """Return the program's schedule; a program without one can't run."""
    if program.schedule is None:
        raise InternalError("a program without a schedule can't run: it is not lowered")
    return program.schedule


def bucket_stages(bucket: Bucket) -> tuple[int, ...]:
    """Return the stages that keep a bucket: all homes of its parameters when they are tied."""
    return bucket.tied_stages or (bucket.stage,)


def plan_layout(program: Program, stages: Iterable[int]) -> Layout:
    """Return the layout of a rank that holds ``stages``."""
    buckets, slots = _all_slots(program)
    held = set(stages)
    own = {name: b for name, b in buckets.items() if held & set(bucket_stages(b))}
    here = {fqn: slot for fqn, slot in slots.items() if slot.bucket in own}
    trained = [buckets[slot.bucket].dtype for slot in slots.values() if slot.spec.requires_grad]
    return Layout(own, here, reduce(torch.promote_types, trained) if trained else torch.float32)


def _all_slots(program: Program) -> tuple[dict[str, Bucket], dict[str, Slot]]:
    buckets = {bucket.name: bucket for bucket in program.buckets}
    slots: dict[str, Slot] = {}
    for spec in program.params:
        if spec.is_buffer or not spec.homes:
            continue
        shape = spec.local_shape(program.mesh)
        name, offset = spec.storage.bucket, spec.storage.offset
        if not name:
            name, offset = _append(buckets, spec, math.prod(shape))
        slots[spec.fqn] = Slot(spec, name, offset, shape)
    _check(buckets, slots, program.mesh)
    return buckets, slots


def _append(buckets: dict[str, Bucket], spec: ParamSpec, numel: int) -> tuple[str, int]:
    """Put a parameter that no pass gave a bucket at the end of its stage's own one."""
    tied = spec.homes if len(spec.homes) > 1 else ()
    dtype = str(spec.dtype).removeprefix("torch.")
    name = f"s{spec.homes[0]}.{spec.fqn}" if tied else f"s{spec.homes[0]}.{dtype}"
    old = buckets.get(name) or Bucket(name, spec.homes[0], (), 0, spec.dtype, None, tied)
    fqns = (*old.fqns, spec.fqn)
    buckets[name] = replace(old, fqns=fqns, length=old.length + numel)
    return name, old.length


def _check(buckets: dict[str, Bucket], slots: dict[str, Slot], mesh: Mesh) -> None:
    for slot in slots.values():
        bucket = buckets.get(slot.bucket)
        if bucket is None:
            raise InternalError(f"'{slot.spec.fqn}' lies in bucket '{slot.bucket}': there is none")
        if slot.offset + slot.numel > bucket.length:
            raise InternalError(f"'{slot.spec.fqn}' lies past the end of bucket '{bucket.name}'")
        if (bucket.axis is not None) != isinstance(slot.spec.storage, Flat):
            raise InternalError(
                f"'{slot.spec.fqn}' and bucket '{bucket.name}' disagree on being cut in shards"
            )
    for bucket in buckets.values():
        if bucket.axis is not None and bucket.length % mesh.size(bucket.axis):
            raise InternalError(
                f"bucket '{bucket.name}' of {bucket.length} elements can't be cut in"
                f" {mesh.size(bucket.axis)} equal shards"
            )
