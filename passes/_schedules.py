"""The schedule a plan asks for, before transfers are added to it."""

from __future__ import annotations

from pathlib import Path

from autoshard.diagnostics import ScheduleError
from autoshard.dsl.resolve import Resolved
from autoshard.plan import Call
from autoshard.schedule import Schedule, make_schedule


def compute_schedule(resolved: Resolved) -> Schedule:
    """Return the compute actions of the plan's schedule; a `csv` file is read here."""
    block, ranks = resolved.plan.pipeline, resolved.mesh.size("pp")
    if isinstance(block.schedule, Call):
        return _from_file(Path(block.schedule.args[0]), resolved)
    return make_schedule(
        block.schedule,
        num_ranks=ranks,
        num_microbatches=resolved.num_microbatches,
        virtual_stages=block.virtual_stages if block.virtual_stages > 1 else None,
        max_in_flight=block.max_in_flight,
    )


def _from_file(path: Path, resolved: Resolved) -> Schedule:
    try:
        schedule = Schedule.from_csv(path.read_text(), path.name)
    except OSError as error:
        raise ScheduleError(
            f"can't read the schedule `{path}`: {error.strerror}",
            span=resolved.plan.span("pipeline.schedule"),
        ) from error
    found = (schedule.num_ranks, schedule.num_microbatches)
    wanted = (resolved.mesh.size("pp"), resolved.num_microbatches)
    if found != wanted:
        raise ScheduleError(
            f"`{path}` is for {found[0]} ranks and {found[1]} microbatches, "
            f"the plan has pp = {wanted[0]} and {wanted[1]}",
            span=resolved.plan.span("pipeline.schedule"),
        )
    return schedule
