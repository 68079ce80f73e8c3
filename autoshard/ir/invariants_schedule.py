"""The invariant of schedules."""

from __future__ import annotations

from autoshard.diagnostics import VerifyError
from autoshard.ir.program import Program
from autoshard.schedule import find_problems


def check_schedulable(program: Program) -> None:
    """Check that the schedule obeys its rules and is for this program."""
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
    problems = find_problems(schedule, is_training=program.training)
    if problems:
        raise VerifyError(f"the schedule is invalid: {problems[0]}")
