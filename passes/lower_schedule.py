"""Turn the plan's schedule into each rank's list of actions, transfers and storage included.

Schedules as tables of actions are those of torch.distributed.pipelining. Which actions exist and in
which order is decided by ``autoshard.schedule``; this pass says what the program needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from autoshard.compiler.pass_base import Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.cost.stage_times import stage_times
from autoshard.ir.program import Level, Program
from autoshard.passes._schedules import compute_schedule
from autoshard.schedule import Action, Kind, Schedule, lower_schedule

# Which phase graph a storage action runs. RESHARD frees what U gathered.
_RUNS = {Kind.UNSHARD: "U", Kind.RESHARD: "U", Kind.REDUCE_GRAD: "R"}


@register
@dataclass(frozen=True)
class LowerSchedule(Pass):
    """Give every rank its actions: compute, SEND and RECV, UNSHARD and REDUCE_GRAD.

        1f1b of 2 ranks, 2 microbatches  -->  rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 ...
                                              rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 ...

    UNSHARD and RESHARD stand in the schedule when parameters are gathered once per step and freed
    after it (`reshard_after_forward = step`); with ZeRO 1 and 2 the run-time gathers before the
    first action. REDUCE_GRAD stands after the last weight gradient of a stage that has a graph R;
    one that sums tied gradients with other ranks comes after all else. Times per stage, estimated
    from flops, steer schedules that are searched for and place the transfers. An eval program has
    forwards only.
    """

    name: ClassVar[str] = "lower-schedule"
    group: ClassVar[str] = "schedule"
    level: ClassVar[Level] = Level.SCHEDULE
    assumes: ClassVar[frozenset[str]] = frozenset({"phased"})
    establishes: ClassVar[frozenset[str]] = frozenset({"schedulable"})

    def run(self, program: Program, ctx: PassContext) -> None:
        """Fill ``program.schedule``."""
        if program.schedule is not None:
            return
        costs = stage_times(program)
        schedule = compute_schedule(ctx.resolved, costs)
        if not program.training:
            schedule = schedule.only({Kind.F})
        zero = ctx.resolved.plan.zero
        by_step = zero.stage == 3 and zero.reshard_after_forward == "step"
        lowered = lower_schedule(
            schedule,
            reduce_per="step" if program.training else "microbatch",
            unshard="step" if by_step else "never",
            costs=costs,
            reduce_last=_tied_stages(program),
        )
        phases = {stage.index: stage.phases for stage in program.stages}
        program.schedule = _keep(
            lowered, lambda a: a.kind not in _RUNS or _RUNS[a.kind] in phases[a.stage]
        )
        program.num_microbatches = schedule.num_microbatches
        program.level = Level.SCHEDULE


def _tied_stages(program: Program) -> tuple[int, ...]:
    """Return the stages whose graph R reduces parameters that several stages use."""
    tied = {bucket.name for bucket in program.buckets if bucket.tied_stages}
    reductions = {s.index: s.phases["R"] for s in program.stages if "R" in s.phases}
    return tuple(i for i, r in reductions.items() if any(port.name in tied for port in r.inputs))


def _keep(schedule: Schedule, wanted: Callable[[Action], bool]) -> Schedule:
    ranks = tuple(tuple(filter(wanted, row)) for row in schedule.ranks)
    return replace(schedule, ranks=ranks)
