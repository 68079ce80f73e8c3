"""What one step of a rank consists of, counted in its programs: they are straight-line code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from autoshard.ir.communication import node_traffic
from autoshard.ir.graph_function import GRAD, GraphFunction
from autoshard.ir.program import Program
from autoshard.ops.collectives import pack
from autoshard.runtime.messages import Messages
from autoshard.schedule import Action, Kind
from autoshard.schedule.action import RECVS, SENDS

aten = torch.ops.aten
COPIES = {aten.clone.default, aten._to_copy.default, aten.copy.default}
PHASES = {
    Kind.B: ("I", "W"),
    Kind.UNSHARD: ("U",),
    Kind.REDUCE_GRAD: ("R",),
    **{kind: (kind.value,) for kind in (Kind.F, Kind.I, Kind.W)},
}


def count_step(
    program: Program,
    messages: Messages,
    actions: Iterable[Action],
    gathered_first: Iterable[int],
) -> dict[str, int]:
    """Return actions, launches, copies, collectives and messages of a training step.

    A launch is a call of an operator; a gradient written to its place is a copy. Stages of
    ``gathered_first`` run U before the first action. Views count as launches: they cost the host
    as much.
    """
    counts: Counter[str] = Counter(actions=0, launches=0, copies=0, collectives=0, messages=0)
    for stage in gathered_first:
        counts.update(_of_phase(program.stages[stage].phases.get("U")))
    for action in actions:
        counts["actions"] += 1
        if action.kind in SENDS or action.kind in RECVS:
            counts["messages"] += len(messages.values(action))
        for name in PHASES.get(action.kind, ()):
            counts.update(_of_phase(program.stages[action.stage].phases.get(name)))
    return dict(counts)


def _of_phase(function: GraphFunction | None) -> dict[str, int]:
    if function is None:
        return {}
    calls = [node for node in function.graph.nodes if node.op == "call_function"]
    packed = [len(node.args[0]) for node in calls if node.target is pack]
    given = sum(node is not None for node in function.named_results(GRAD).values())
    return {
        "launches": len(calls),
        "copies": sum(node.target in COPIES for node in calls) + sum(packed) + given,
        "collectives": sum(len(node_traffic(node)) for node in calls),
    }
