"""Choices of a plan that trade memory, messages and gathers: what each way costs, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from tabulate import tabulate
from torch.fx import Node

from autoshard.cost.traffic import tensor_bytes
from autoshard.ir.graph_function import BOUNDARY, FLAT, FULL
from autoshard.ir.node_info import info, val
from autoshard.ir.placement import Replicate, Shard
from autoshard.ir.program import Bucket, Program, Stage
from autoshard.units import show_bytes

TP = "tp"


@dataclass(frozen=True)
class BoundaryChoice:
    """Bytes per micro-batch and rank of one value on its way to the next stage, in both ways.

    Whole: every tensor-parallel rank sends all of it. In parts: each sends its part, and the
    receivers gather; the gather stays on the links between tensor-parallel ranks.
    """

    value: str
    to_stage: int
    whole_sent: int
    part_sent: int
    part_gathered: int
    is_in_parts: bool


@dataclass(frozen=True)
class GatherChoice:
    """What ZeRO 3 costs one rank of a stage when it gathers once a step, or in every phase."""

    stage: int
    is_kept: bool  # gathered once and kept over the micro-batches of a step
    is_chosen: bool
    parameter_bytes: int  # gathered at the most at once
    gradient_bytes: int
    gathered_bytes: int  # received in a step
    reduced_bytes: int  # sent in a step


def boundary_choices(program: Program) -> tuple[BoundaryChoice, ...]:
    """Return both ways for every float value that all tensor-parallel ranks hold."""
    size, schedule = program.mesh.size(TP), program.schedule
    if size == 1 or schedule is None:
        return ()
    ranks, found = schedule.stage_to_rank, []
    for left, right in pairwise(program.stages):
        if ranks[left.index] == ranks[right.index]:
            continue
        for name, node in left.phases["F"].named_results(BOUNDARY).items():
            place = info(right.phases["F"].node(BOUNDARY, name)).placement(TP)
            is_in_parts = isinstance(place, Shard) and _is_cut(left, name, node)
            if not is_in_parts and not isinstance(place, Replicate):
                continue
            if val(node).is_floating_point():
                whole = tensor_bytes(node) * (size if is_in_parts else 1)
                part = whole // size
                gathered = part * (size - 1)
                row = BoundaryChoice(name, right.index, whole, part, gathered, is_in_parts)
                found.append(row)
    return tuple(found)


def boundary_table(program: Program) -> str:
    """Return `scatter_boundary` both ways, a line a value; "" where nothing could be in parts."""
    rows = [
        [c.to_stage, c.value, show_bytes(c.whole_sent), show_bytes(c.part_sent),
         show_bytes(c.part_gathered), "in parts" if c.is_in_parts else "whole"]
        for c in boundary_choices(program)
    ]  # fmt: skip
    heads = ["to stage", "value", "whole: sent", "in parts: sent", "and gathered", "chosen"]
    return tabulate(rows, heads) if rows else ""


def gather_table(program: Program) -> str:
    """Return `reshard_after_forward = step` beside gathering in every phase, a line each."""
    rows = [
        [c.stage, "once a step" if c.is_kept else "every phase", show_bytes(c.parameter_bytes),
         show_bytes(c.gradient_bytes), show_bytes(c.gathered_bytes), show_bytes(c.reduced_bytes),
         "chosen" if c.is_chosen else ""]
        for c in gather_choices(program)
    ]  # fmt: skip
    heads = ["stage", "gathered", "params held", "grads held", "gathered", "reduced", ""]
    return tabulate(rows, heads) if rows else ""


def _is_cut(stage: Stage, name: str, node: Node) -> bool:
    """Tell whether a stage cuts a value that it holds whole, or hands on such a part."""
    relayed = stage.phases["F"].node(BOUNDARY, name)
    return node is relayed or str(node.target).startswith("autoshard.shard")


def gather_choices(program: Program) -> tuple[GatherChoice, ...]:
    """Return both ways for every stage of a program under ZeRO 3."""
    return tuple(row for stage in program.stages for row in _gathers_of(program, stage))


def _gathers_of(program: Program, stage: Stage) -> Iterator[GatherChoice]:
    by_phase = {p: set(f.named(FLAT)) for p, f in stage.phases.items() if p in ("F", "I", "W")}
    unshard = stage.phases.get("U")
    kept = {port.name for port in unshard.outputs if port.kind == FULL} if unshard else set()
    names = kept.union(*by_phase.values())
    buckets = [b for b in program.buckets if b.name in names]
    if not buckets:
        return
    count, whole = program.num_microbatches, sum(map(_nbytes, buckets))
    moved = sum(_nbytes(b) - _nbytes(b) // program.mesh.size(b.axis) for b in buckets)
    shards = whole - moved
    times = sum(len(found) for found in by_phase.values()) or 2 * len(buckets)
    per_microbatch = moved * times // len(buckets)
    largest = max(map(_nbytes, buckets))
    yield GatherChoice(stage.index, True, bool(kept), whole, whole, moved, moved)
    yield GatherChoice(
        stage.index, False, not kept, largest, shards, count * per_microbatch, count * moved
    )


def _nbytes(bucket: Bucket) -> int:
    return bucket.length * bucket.dtype.itemsize
