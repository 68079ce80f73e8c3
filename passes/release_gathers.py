"""Release gathered parameters right after their last use.

FSDP's resharding and DeepSpeed's release, as lines of the printed graph. The memory goes where
generated code deletes the value, at the release; this pass makes that place visible and checks it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from autoshard.compiler.pass_base import Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.cost.traffic import tensor_bytes
from autoshard.ir.aliases import lifetime_end
from autoshard.ir.buckets import COMPUTE_PHASES, gathers_of
from autoshard.ir.graph_function import FLAT, SAVED, GraphFunction, Port
from autoshard.ir.node_info import info
from autoshard.ir.program import Level, Program, Stage
from autoshard.ir.rewrite import Rewriter
from autoshard.ops.collectives import all_gather, all_gather_start, release
from autoshard.plan import ZeroBlock


@register
@dataclass(frozen=True)
class ReleaseGathers(Pass):
    """Mark where each gathered bucket dies.

        y = mm(x, view_at(g))  -->  y = mm(x, view_at(g))
        ...                         release(g)
                                    ...

    With `reshard_after_forward = off` F does not release what backward gathers too: it hands it on
    as a kept value, and backward gathers no more. `keep_gathered` hands on as many bytes only, the
    last units first: backward needs them soonest. Each microbatch in flight then keeps its copy.
    """

    name: ClassVar[str] = "release-gathers"
    group: ClassVar[str] = "zero"
    level: ClassVar[Level] = Level.JOINT
    assumes: ClassVar[frozenset[str]] = frozenset({"bucketed"})
    establishes: ClassVar[frozenset[str]] = frozenset({"bounded"})

    def run(self, program: Program, ctx: PassContext) -> None:
        """Insert a release for every gathered bucket of every compute phase."""
        limit = _kept_bytes(ctx.resolved.plan.zero) if program.training else 0
        for stage in program.stages:
            if limit:
                _hand_on(stage, limit, ctx)
            for phase in COMPUTE_PHASES:
                if phase in stage.phases:
                    _release(stage.phases[phase])


def _release(function: GraphFunction) -> None:
    rewriter = Rewriter(function, ReleaseGathers.name)
    for whole in gathered_values(function):
        if any(user.target is release for user in whole.users):
            continue
        order = {node: index for index, node in enumerate(function.graph.nodes)}
        last = lifetime_end(whole, order)
        if last.op == "output":
            continue
        with rewriter.after(last):
            rewriter.call(release, whole, like=whole, placements={})


def gathered_values(function: GraphFunction) -> list[Node]:
    """Return the whole buckets that a phase gathers or is handed, in graph order."""
    handed = [node for name, node in function.named(SAVED).items() if name.startswith(_PREFIX)]
    return [*handed, *map(_whole, gathers_of(function).values())]


_PREFIX = "gathered:"


def _kept_bytes(zero: ZeroBlock) -> float:
    """Return how many gathered bytes F may hand on to backward."""
    if zero.reshard_after_forward == "off":
        return math.inf
    return zero.keep_gathered.count if zero.keep_gathered else 0


def _hand_on(stage: Stage, limit: float, ctx: PassContext) -> None:
    """Let backward read the buckets that F gathered last, up to ``limit`` bytes of them."""
    forward = stage.phases["F"]
    backward = {p: stage.phases[p] for p in ("I", "W") if p in stage.phases}
    again = {name for function in backward.values() for name in gathers_of(function)}
    made, chosen = gathers_of(forward), set()
    for name in reversed(made):
        if name in again or Port(SAVED, _PREFIX + name) in forward.outputs:
            limit -= tensor_bytes(_whole(made[name]))
            if limit >= 0:
                chosen.add(name)
    for phase, function in backward.items():
        for name, start in gathers_of(function).items():
            if name not in chosen:
                continue
            port = Port(SAVED, _PREFIX + name)
            if port not in forward.outputs:
                kept = _whole(made[name])
                forward.set_outputs([*forward.results, kept], [*forward.outputs, port])
            _read_instead(function, name, start, port)
            ctx.applied(f"stage {stage.index} {phase}", f"{name} stays gathered from F on")


def _read_instead(function: GraphFunction, name: str, start: Node, port: Port) -> None:
    """Replace a gather by a value kept by an earlier phase."""
    rewriter = Rewriter(function, ReleaseGathers.name)
    whole = _whole(start)
    given = rewriter.placeholder(port, whole.meta["val"], info(whole))
    rewriter.replace(whole, given)
    if whole is not start:
        rewriter.graph.erase_node(start)
    rewriter.drop_input(Port(FLAT, name))


def _whole(gather: Node) -> Node:
    """Return the node that holds the gathered bucket: the wait of a start."""
    if gather.target is all_gather:
        return gather
    assert gather.target is all_gather_start
    (wait,) = gather.users
    return wait
