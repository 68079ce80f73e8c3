"""Hand gathered parameters on from forward to backward, where memory allows it.

Megatron and FSDP keep all parameters gathered or none (`reshard_after_forward`); the step between,
a set within bytes, follows from knowing the peak. What forward gathered last, backward needs first.
This pass does not choose whether parameters are cut at all: `shard-storage` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from autoshard.compiler.pass_base import Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.cost.kept import Kept, KeptPeaks
from autoshard.cost.traffic import tensor_bytes
from autoshard.ir.buckets import COMPUTE_PHASES, gathers_of, kept_port
from autoshard.ir.graph_function import FLAT, GraphFunction, Port
from autoshard.ir.node_info import info
from autoshard.ir.program import Level, Program, Stage
from autoshard.ir.rewrite import Rewriter
from autoshard.ops.collectives import release
from autoshard.passes._exposed_waits import exposed_waits
from autoshard.passes._gathers import whole_bucket
from autoshard.plan import ZeroBlock
from autoshard.units import Size, show_bytes


@register
@dataclass(frozen=True)
class KeepGathers(Pass):
    """Let backward read a bucket that forward gathered, instead of gathering it again.

        F: g = wait(all_gather_start(flat))    F: g = wait(all_gather_start(flat))
           ... release(g)                         ... return g
        I: h = wait(all_gather_start(flat))    I: (g)
           ... release(h)                         ... release(g)

    All of them with `reshard_after_forward = off`, and as many bytes of a stage as `keep_gathered`
    says, the last units first: backward needs them soonest. Each micro-batch in flight keeps its
    copy. Never so many that more than `max_gathered` would be whole on a rank at any moment of its
    schedule; a remark says which ones that leaves out. Gathers are moved no more after this pass:
    a note tells of every wait of a phase that nothing hides, and why.
    """

    name: ClassVar[str] = "keep-gathers"
    group: ClassVar[str] = "schedule"
    level: ClassVar[Level] = Level.SCHEDULE
    assumes: ClassVar[frozenset[str]] = frozenset({"bounded", "schedulable"})

    limit_bytes: int = -1  # to hand on in each stage; -1: what the plan says

    def run(self, program: Program, ctx: PassContext) -> None:
        """Choose for every rank's stages, rewrite their phases, tell of exposed waits."""
        zero = ctx.resolved.plan.zero
        limit = _plan_limit(zero) if self.limit_bytes < 0 else self.limit_bytes
        if program.training and limit:
            for stage, names in _choose(program, limit, zero, ctx).items():
                _hand_on(program.stages[stage], names, ctx)
        for stage in program.stages:
            for phase in COMPUTE_PHASES:
                if phase in stage.phases:
                    where = f"stage {stage.index} {phase}"
                    for wait in exposed_waits(stage.phases[phase], program, zero.prefetch):
                        ctx.note(wait.path or where, f"{phase} {wait}")


def _plan_limit(zero: ZeroBlock) -> float:
    """Return how many gathered bytes a stage's forward may hand on to backward."""
    if zero.reshard_after_forward == "off":
        return math.inf
    return zero.keep_gathered.count if zero.keep_gathered else 0


@dataclass(frozen=True)
class _Room:
    """What must hold on a rank, whatever is kept."""

    peaks: KeptPeaks
    gathered: int  # bytes that are whole at once, at the most

    def excess(self, rank: int, kept: Kept) -> str:
        """Return why a rank can't keep so much, "" when it can."""
        gathered = self.peaks.of(rank, kept).gathered
        if gathered <= self.gathered:
            return ""
        limit = f"`max_gathered = {Size(self.gathered)}`"
        return f"with it {show_bytes(gathered)} would be whole at once, {limit}"


def _choose(program: Program, limit: float, zero: ZeroBlock, ctx: PassContext) -> Kept:
    """Return which buckets each stage hands on, in the order of `_offers`."""
    offers = {stage.index: _offers(stage, limit) for stage in program.stages}
    if zero.max_gathered is None:
        return offers
    assert program.schedule is not None
    room, chosen = _Room(KeptPeaks(program), zero.max_gathered.count), dict[int, list[str]]()
    for rank in range(program.schedule.num_ranks):
        for stage in sorted(program.schedule.stages_of(rank), reverse=True):
            names = offers[stage]
            chosen[stage], why = _fitting(room, rank, chosen, stage, names)
            left = names[len(chosen[stage]) :]
            if left:
                more = f" and {len(left) - 1} more are" if left[1:] else " is"
                ctx.missed(f"stage {stage}", f"`{left[0]}`{more} gathered again: {why}")
    return chosen


def _fitting(
    room: _Room, rank: int, chosen: Kept, stage: int, names: list[str]
) -> tuple[list[str], str]:
    """Return the longest beginning of ``names`` that fits, and why no longer one does."""
    low, high = 0, len(names)
    why = room.excess(rank, {**chosen, stage: names})
    if not why:
        return names, ""
    while high - low > 1:  # so many fit, so many don't
        middle = (low + high) // 2
        excess = room.excess(rank, {**chosen, stage: names[:middle]})
        low, high, why = (low, middle, excess) if excess else (middle, high, why)
    return names[:low], why


def _offers(stage: Stage, limit: float) -> list[str]:
    """Return the buckets that backward gathers again, the last first, up to ``limit`` bytes."""
    forward = stage.phases["F"]
    again = {n for p in ("I", "W") if p in stage.phases for n in gathers_of(stage.phases[p])}
    offers = []
    for name, start in reversed(gathers_of(forward).items()):
        is_kept = kept_port(name) in forward.outputs
        if name in again or is_kept:
            limit -= tensor_bytes(whole_bucket(start))
            if limit >= 0 and not is_kept:
                offers.append(name)
    return offers


def _hand_on(stage: Stage, names: Iterable[str], ctx: PassContext) -> None:
    """Let forward return buckets, and the phases of backward read them."""
    forward = stage.phases["F"]
    made = gathers_of(forward)
    for name in names:
        whole = whole_bucket(made[name])
        for node in [user for user in whole.users if user.target is release]:
            forward.graph.erase_node(node)
        forward.set_outputs([*forward.results, whole], [*forward.outputs, kept_port(name)])
        for phase in ("I", "W"):
            if phase in stage.phases and name in gathers_of(stage.phases[phase]):
                _read_instead(stage.phases[phase], name)
                ctx.applied(f"stage {stage.index} {phase}", f"{name} stays gathered from F on")


def _read_instead(function: GraphFunction, name: str) -> None:
    """Replace a gather by a value that an earlier phase kept."""
    rewriter, start = Rewriter(function, KeepGathers.name), gathers_of(function)[name]
    whole, part = whole_bucket(start), start.args[0]
    given = rewriter.placeholder(kept_port(name), whole.meta["val"], info(whole))
    rewriter.replace(whole, given)
    for node in (start, part):
        if node is not whole and node.op == "call_function" and not node.users:
            rewriter.graph.erase_node(node)
    rewriter.drop_input(Port(FLAT, name))
