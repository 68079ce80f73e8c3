"""Start gathers early enough that they overlap with the computation of earlier units.

Prefetching the next unit's parameters is DeepSpeed's and FSDP's; here it is a reordering of the
printed graph, so it can change no number. This pass does not reorder gathers among themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from autoshard.compiler.pass_base import Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.ir.aliases import lifetime_end
from autoshard.ir.buckets import COMPUTE_PHASES, gathers_of
from autoshard.ir.graph_function import GraphFunction
from autoshard.ir.program import Level, Program
from autoshard.ops.collectives import all_gather_start
from autoshard.passes._exposed_waits import exposed_waits
from autoshard.units import show_bytes


@register
@dataclass(frozen=True)
class PrefetchGathers(Pass):
    """Hoist the start of each gather before the wait of the gather ``depth`` units ahead of it.

        s0 = all_gather_start(flat0)       s0 = all_gather_start(flat0)
        g0 = wait(s0)                      s1 = all_gather_start(flat1)
        ... uses g0                   -->  g0 = wait(s0)
        s1 = all_gather_start(flat1)       ... uses g0
        g1 = wait(s1)                      g1 = wait(s1)

    Within `limit_bytes` of gathered parameters alive at once, when that is given: a start that
    would pass it moves less far, with a remark. Costs ``depth`` more gathered buckets of memory. A
    note tells of every wait that still has nothing to hide behind, and why.
    """

    name: ClassVar[str] = "prefetch-gathers"
    group: ClassVar[str] = "zero"
    level: ClassVar[Level] = Level.JOINT
    assumes: ClassVar[frozenset[str]] = frozenset({"bucketed"})

    depth: int = -1  # units ahead; -1: `zero.prefetch` of the plan
    limit_bytes: int = 0  # gathered bytes alive at once; 0: no limit

    def run(self, program: Program, ctx: PassContext) -> None:
        """Move starts in every compute phase."""
        depth = ctx.resolved.plan.zero.prefetch if self.depth < 0 else self.depth
        for stage in program.stages:
            for phase in COMPUTE_PHASES:
                if phase in stage.phases:
                    where = f"stage {stage.index} {phase}"
                    function = stage.phases[phase]
                    late = _prefetch(function, depth, self.limit_bytes, where, ctx)
                    for wait in exposed_waits(function, depth, late):
                        ctx.note(wait.path or where, f"{phase} {wait}")


@dataclass(frozen=True)
class _Gather:
    """One gather: its two nodes, its size, and where the value it gathers is last read."""

    start: Node
    wait: Node
    nbytes: int
    needed_at: int
    last_read: int


def _prefetch(
    function: GraphFunction, depth: int, limit: int, where: str, ctx: PassContext
) -> set[Node]:
    """Move each start to just before the wait that is at most ``depth`` gathers earlier.

    Returns those that the limit held back.
    """
    gathers, late = find_gathers(function), set()
    places: list[int] = []  # where each start now stands, as an index of the old order
    for index, gather in enumerate(gathers):
        chosen = _choose(gathers, places, index, depth, limit)
        places.append(0 if chosen < 0 else gathers[chosen].needed_at)
        target = _first_call(function) if chosen < 0 else gathers[chosen].wait
        if target is not gather.start:
            target.prepend(gather.start)
            if gather.start.args[0].op == "call_function":
                gather.start.prepend(gather.start.args[0])  # the cast of a master
        if chosen > max(index - depth, -1):
            nbytes = show_bytes(gather.nbytes)
            ctx.missed(where, f"gather {index} of {nbytes} starts late: the limit is {limit} bytes")
            late.add(gather.start)
    return late


def find_gathers(function: GraphFunction) -> list[_Gather]:
    """Return the split gathers of a phase, in the order in which they start."""
    order = {node: index for index, node in enumerate(function.graph.nodes)}
    found = []
    for node in gathers_of(function).values():
        if node.target is not all_gather_start:
            continue
        (wait,) = node.users
        value = wait.meta["val"]
        last = lifetime_end(wait, order)
        nbytes = value.numel() * value.element_size()
        found.append(_Gather(node, wait, nbytes, order[wait], order[last]))
    return found


def _choose(gathers: list[_Gather], places: list[int], index: int, depth: int, limit: int) -> int:
    """Return before whose wait gather ``index`` starts; -1 is the beginning of the phase."""
    for ahead in range(depth, 0, -1):
        if ahead > index + 1:
            continue
        chosen = index - ahead
        place = 0 if chosen < 0 else gathers[chosen].needed_at
        if not limit or _alive(gathers, places, index, place) <= limit:
            return chosen
    return index


def _alive(gathers: list[_Gather], places: list[int], index: int, place: int) -> int:
    """Return the most gathered bytes alive while gather ``index`` is early."""
    gather = gathers[index]
    others = [
        (begin, other.last_read, other.nbytes)
        for other, begin in zip(gathers[:index], places, strict=True)
        if other.last_read >= place
    ]
    moments = [place, *(begin for begin, _, _ in others if begin > place)]
    at_once = (
        sum(size for begin, end, size in others if begin <= moment <= end) for moment in moments
    )
    return gather.nbytes + max(at_once, default=0)


def _first_call(function: GraphFunction) -> Node:
    return next(node for node in function.graph.nodes if node.op == "call_function")
