"""Check that the norm by which gradients are clipped counts every element of the model once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import product

from autoshard.ir import norm
from autoshard.ir.params import ParamSpec
from autoshard.ir.program import Bucket, Program
from autoshard.mesh import DATA_PARALLEL, Mesh

AXES = ("dp", "tp", "pp")
Place = Mapping[str, int]  # along each axis
Part = tuple[int, int]  # a tensor parallel piece of a parameter, and a data parallel shard of it


def check_norm(program: Program) -> Iterator[str]:
    """Say which parts of which parameter the ranks whose sums are added count never, or twice."""
    sums: dict[tuple[int, ...], list[Place]] = defaultdict(list)
    for place in _places(program.mesh):
        sums[tuple(place[axis] for axis in AXES if axis not in norm.NORM_AXES)].append(place)
    for bucket in program.buckets:
        for fqn in bucket.fqns:
            spec = program.params[fqn]
            for places, own in product(sums.values(), _kinds(spec)):
                counted = Counter(_counted(program, spec, bucket, places, own))
                counted.update(dict.fromkeys(_parts(program, spec, bucket, own), 0))
                bad = next((part for part, times in counted.items() if times != 1), None)
                if bad is not None:
                    times = f"{counted[bad]} times"
                    yield f"the norm counts piece {bad[0]}, shard {bad[1]} of '{fqn}' {times}"
                    break


def _kinds(spec: ParamSpec) -> tuple[bool, ...]:
    """Return for which rows to count: all, and by themselves those before the copies of others."""
    if not spec.requires_grad:
        return ()
    return (False, True) if spec.copies and spec.copies.own else (False,)


def _places(mesh: Mesh) -> Iterator[Place]:
    """Yield where each rank stands; `dp` counts through the axes of hybrid data parallelism."""
    data = mesh.members("dp") or ("dp",)
    names = (*data, "tp", "pp")
    for index in product(*(range(mesh.size(axis)) for axis in names)):
        place = dict(zip(names, index, strict=True))
        dp = 0
        for name in data:
            dp = dp * mesh.size(name) + place[name]
        yield {**dict.fromkeys(DATA_PARALLEL, 0), **place, "dp": dp}


def _counted(
    program: Program, spec: ParamSpec, bucket: Bucket, places: list[Place], own: bool
) -> Iterator[Part]:
    """Yield the parts that these ranks count, one for each rank that counts."""
    times = spec.copies.times if spec.copies and not own else 1
    for place in places:
        stages = _stages(program, place["pp"])
        if norm.counts_in_norm(spec, bucket, place.__getitem__, stages, own=own):
            piece = place["tp"] // times if spec.is_sharded("tp") else 0
            yield piece, 0 if bucket.axis is None else place[bucket.axis]


def _parts(program: Program, spec: ParamSpec, bucket: Bucket, own: bool) -> Iterator[Part]:
    times = spec.copies.times if spec.copies and not own else 1
    pieces = program.mesh.size("tp") // times if spec.is_sharded("tp") else 1
    shards = 1 if bucket.axis is None else program.mesh.size(bucket.axis)
    return product(range(pieces), range(shards))


def _stages(program: Program, pp: int) -> tuple[int, ...]:
    return program.schedule.stages_of(pp) if program.schedule else (pp,)
