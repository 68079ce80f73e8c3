"""How long a stage's phases take beside each other, estimated from their flops."""

from __future__ import annotations

from autoshard.ir.flops import node_flops
from autoshard.ir.graph_function import GraphFunction
from autoshard.ir.program import Program
from autoshard.schedule import Costs

SHARES = 12  # times are whole numbers, so that ties are ties: twelfths of a mean forward


def stage_times(program: Program) -> Costs:
    """Return the times of F, I and W per stage, in shares of the mean F; none is zero."""
    flops = {
        phase: [_flops(stage.phases.get(phase)) for stage in program.stages]
        for phase in ("F", "I", "W")
    }
    unit = max(1, sum(flops["F"]) // len(program.stages))
    times = {
        phase: tuple(max(1, round(SHARES * count / unit)) for count in row)
        for phase, row in flops.items()
    }
    return Costs(times["F"], times["I"], times["W"])


def _flops(function: GraphFunction | None) -> int:
    nodes = () if function is None else function.graph.nodes
    return sum(node_flops(node) for node in nodes if node.op == "call_function")
