"""Bytes that one rank of each stage moves in one step, read off the program's own graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from autoshard.ir.communication import node_traffic
from autoshard.ir.graph_function import BOUNDARY, TANGENT, GraphFunction
from autoshard.ir.program import PER_MICROBATCH, Program, Stage
from autoshard.ops.library import Traffic
from autoshard.schedule.action import Kind


@dataclass(frozen=True)
class TrafficRow:
    """All calls of one kind over one axis by one rank of one stage in one step."""

    stage: int
    axis: str
    kind: str  # "all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"
    calls: int
    payload_bytes: int  # sum of what enters the collectives on this rank
    wire_bytes: int  # sum of what this rank must send, at the minimum of each collective


def traffic(program: Program) -> tuple[TrafficRow, ...]:
    """Return what each stage's rank communicates in one step, summed per axis and kind."""
    rows: dict[tuple[int, str, str], list[int]] = {}
    for stage in program.stages:
        for item, times in (*_collectives(stage, program), *_sends(stage, program)):
            entry = rows.setdefault((stage.index, item.axis, item.kind), [0, 0, 0])
            entry[0] += times
            entry[1] += times * item.nbytes
            entry[2] += times * wire_bytes(item, item.ranks(program.mesh.size(item.axis)))
    return tuple(TrafficRow(*key, *entry) for key, entry in sorted(rows.items()))


def wire_bytes(item: Traffic, size: int) -> int:
    """Return the least bytes a rank sends for one collective over ``size`` ranks.

    An all-reduce is a reduce-scatter and an all-gather; an all-gather's payload is a shard.
    """
    if item.kind == "send":
        return item.nbytes
    if item.kind == "all_reduce":
        return 2 * (size - 1) * item.nbytes // size
    if item.kind == "all_gather":
        return (size - 1) * item.nbytes
    return (size - 1) * item.nbytes // size


def tensor_bytes(node: Node) -> int:
    """Return the bytes of a node's value, 0 when it is not one tensor."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if hasattr(value, "numel") else 0


def _collectives(stage: Stage, program: Program) -> Iterator[tuple[Traffic, int]]:
    for phase, function in stage.phases.items():
        times = program.num_microbatches if phase in PER_MICROBATCH else 1
        for node in function.graph.nodes:
            for item in node_traffic(node):
                yield item, times


def _sends(stage: Stage, program: Program) -> Iterator[tuple[Traffic, int]]:
    """Yield what the schedule's sends carry; a hand-over on one rank sends nothing."""
    if program.schedule is None:
        return
    sent = [a for _, _, a in program.schedule.positions() if a.stage == stage.index]
    for kind, phase, port in ((Kind.SEND_F, "F", BOUNDARY), (Kind.SEND_B, "I", TANGENT)):
        times = sum(a.kind is kind for a in sent)
        if times and phase in stage.phases:
            yield Traffic("send", "pp", _port_bytes(stage.phases[phase], port)), times


def _port_bytes(function: GraphFunction, kind: str) -> int:
    return sum(tensor_bytes(n) for n in function.named_results(kind).values() if n is not None)
