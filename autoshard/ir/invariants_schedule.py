"""The invariant of schedules."""

from __future__ import annotations

from autoshard.diagnostics import VerifyError
from autoshard.ir.program import Program
from autoshard.schedule import Kind, find_problems


def check_schedulable(program: Program) -> None:
    """Check that the schedule obeys its rules and is for this program.

    Whether gradients come in micro-batch order is the plan's choice, which lower-schedule checks.
    """
    schedule = program.schedule
    if schedule is None:
        raise VerifyError("the program has no schedule")
    if schedule.num_stages != len(program.stages):
        raise VerifyError(
            f"the schedule has {schedule.num_stages} stages, the program {len(program.stages)}"
        )
    if schedule.num_ranks != program.mesh.size("pp"):
        raise VerifyError(
            f"the schedule has {schedule.num_ranks} ranks, the mesh {program.mesh.size('pp')}"
        )
    problems = find_problems(schedule, accumulation="any", is_training=program.training)
    if problems:
        raise VerifyError(f"the schedule is invalid: {problems[0]}")
    _check_tied_reductions(program)


def _check_tied_reductions(program: Program) -> None:
    """Check that a rank sums tied gradients after all that any of its stages computes."""
    tied = {bucket.name for bucket in program.buckets if bucket.tied_stages}
    weights = (Kind.W, Kind.B)
    for rank, row in enumerate(program.schedule.ranks):
        last = max((i for i, action in enumerate(row) if action.kind in weights), default=0)
        for action in row[:last]:
            if action.kind is not Kind.REDUCE_GRAD:
                continue
            reduced = program.stages[action.stage].phases["R"].inputs
            if tied & {port.name for port in reduced}:
                raise VerifyError(
                    f"rank {rank}: {action} sums tied gradients before {row[last]}: their other "
                    "stages may wait for it, or add to them"
                )
