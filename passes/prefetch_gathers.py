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
from autoshard.dsl.resolve import Resolved
from autoshard.ir.buckets import COMPUTE_PHASES
from autoshard.ir.graph_function import GraphFunction
from autoshard.ir.program import Level, Program
from autoshard.passes._gathers import Gather, check_fits, find_gathers
from autoshard.passes._schedules import stage_ranks
from autoshard.units import Size, show_bytes


@register
@dataclass(frozen=True)
class PrefetchGathers(Pass):
    """Hoist the start of each gather before the wait of the gather ``depth`` units ahead of it.

        s0 = all_gather_start(flat0)       s0 = all_gather_start(flat0)
        g0 = wait(s0)                      s1 = all_gather_start(flat1)
        ... uses g0                   -->  g0 = wait(s0)
        s1 = all_gather_start(flat1)       ... uses g0
        g1 = wait(s1)                      g1 = wait(s1)

    Within `max_gathered` of the plan: a start that would let more bytes be whole at once moves less
    far, with a remark; a unit that does not fit even where it is needed is an error. What forward
    hands on to backward comes last and has to fit into what is left: `keep-gathers`. Costs
    ``depth`` more gathered buckets of memory.
    """

    name: ClassVar[str] = "prefetch-gathers"
    group: ClassVar[str] = "zero"
    level: ClassVar[Level] = Level.JOINT
    assumes: ClassVar[frozenset[str]] = frozenset({"bucketed"})

    depth: int = -1  # units ahead; -1: `zero.prefetch` of the plan
    limit_bytes: int = -1  # gathered bytes alive at once; -1: `zero.max_gathered` of the plan

    def run(self, program: Program, ctx: PassContext) -> None:
        """Move starts in every compute phase."""
        depth = ctx.resolved.plan.zero.prefetch if self.depth < 0 else self.depth
        limit = _plan_limit(ctx.resolved) if self.limit_bytes < 0 else self.limit_bytes
        if limit is not None:
            check_fits(program, stage_ranks(ctx.resolved), limit, ctx.resolved)
        for stage in program.stages:
            for phase in COMPUTE_PHASES:
                if phase in stage.phases:
                    function = stage.phases[phase]
                    for late in _prefetch(function, program, depth, limit):
                        ctx.missed(f"stage {stage.index} {phase}", f"{late}")


def _plan_limit(resolved: Resolved) -> int | None:
    zero = resolved.plan.zero
    return zero.max_gathered.count if zero.stage == 3 and zero.max_gathered else None


@dataclass(frozen=True)
class _Late:
    """A gather that the limit held back."""

    gather: Gather
    ahead: int  # units
    depth: int
    limit: int

    def __str__(self) -> str:
        what = f"the gather of `{self.gather.bucket}` ({show_bytes(self.gather.nbytes)})"
        starts = f"starts {self.ahead} unit{'s' * (self.ahead != 1)} ahead, not {self.depth}"
        return f"{what} {starts}: `max_gathered = {Size(self.limit)}` holds it back"


Interval = tuple[int, int, int]  # (from which place, to which, bytes) a bucket is alive


def _prefetch(
    function: GraphFunction, program: Program, depth: int, limit: int | None
) -> list[_Late]:
    """Move each start to just before the wait that is at most ``depth`` gathers earlier.

    Returns those that the limit held back.
    """
    gathers, late = find_gathers(function, program), []
    alive: list[Interval] = [(0, g.last_read, g.nbytes) for g in gathers if g.start is None]
    for index, gather in enumerate(gathers):
        if gather.start is None:
            continue
        chosen = _choose(gathers, alive, index, depth, limit)
        alive.append((_place(gathers, chosen), gather.last_read, gather.nbytes))
        target = _first_call(function) if chosen < 0 else gathers[chosen].wait
        if target is not gather.start:
            target.prepend(gather.start)
            if gather.start.args[0].op == "call_function":
                gather.start.prepend(gather.start.args[0])  # the cast of a master
        if limit is not None and chosen > max(index - depth, -1):
            late.append(_Late(gather, index - chosen, min(depth, index + 1), limit))
    return late


def _choose(
    gathers: list[Gather], alive: list[Interval], index: int, depth: int, limit: int | None
) -> int:
    """Return before whose wait gather ``index`` starts; -1 is the beginning of the phase.

    Where it is needed it fits: `check_fits` has seen to that.
    """
    for chosen in range(max(index - depth, -1), index):
        if limit is None:
            return chosen
        if _at_once(gathers[index], alive, _place(gathers, chosen)) <= limit:
            return chosen
    return index


def _place(gathers: list[Gather], chosen: int) -> int:
    return 0 if chosen < 0 else gathers[chosen].needed_at


def _at_once(gather: Gather, alive: list[Interval], place: int) -> int:
    """Return the most bytes alive while ``gather`` is early, from ``place`` on."""
    moments = [place, *(begin for begin, _, _ in alive if place < begin <= gather.needed_at)]
    others = (sum(size for b, end, size in alive if b <= moment <= end) for moment in moments)
    return gather.nbytes + max(others)


def _first_call(function: GraphFunction) -> Node:
    return next(node for node in function.graph.nodes if node.op == "call_function")
