"""The schedule a plan asks for, before transfers are added to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from autoshard.diagnostics import ScheduleError
from autoshard.dsl.resolve import Resolved
from autoshard.plan import Call
from autoshard.schedule import Costs, Schedule, find_problems, make_schedule, place_stages
from autoshard.schedule.action import COMPUTE
from autoshard.schedule.read import read_schedule
from autoshard.source import Span

LOOKED_FOR = "a file is looked for as it is written, then beside the plan"


def stage_ranks(resolved: Resolved) -> tuple[int, ...]:
    """Return the pipeline coordinate of every stage; no schedule is searched for."""
    block, ranks = resolved.plan.pipeline, resolved.mesh.size("pp")
    if isinstance(block.schedule, Call):
        return compute_schedule(resolved).stage_to_rank
    return place_stages(block.schedule, ranks, _virtual_stages(resolved))


def compute_schedule(resolved: Resolved, costs: Costs | None = None) -> Schedule:
    """Return the compute actions of the plan's schedule; a `csv` file is read here.

    ``costs`` per stage steer the schedules that are searched for.
    """
    block, span = resolved.plan.pipeline, _span(resolved)
    if isinstance(block.schedule, Call):
        return _from_file(block.schedule.args[0], resolved)
    with _placed(span):
        return make_schedule(
            block.schedule,
            num_ranks=resolved.mesh.size("pp"),
            num_microbatches=resolved.num_microbatches,
            virtual_stages=_virtual_stages(resolved),
            max_in_flight=block.max_in_flight,
            costs=costs,
        )


def file_problem(resolved: Resolved) -> ScheduleError | None:
    """Return why the plan's `csv` file can't run, None where it can or there is none.

    Its ranks and micro-batches are left out while the plan leaves an axis open.
    """
    schedule = resolved.plan.pipeline.schedule
    if not isinstance(schedule, Call):
        return None
    span = resolved.plan.span("pipeline.schedule")
    try:
        if resolved.auto:
            _read(schedule.args[0], span)
        else:
            compute_schedule(resolved)
    except ScheduleError as error:
        return error
    return None


@contextmanager
def _placed(span: Span | None, *helps: str) -> Iterator[None]:
    """Give errors about a schedule the place in the plan that asks for it."""
    try:
        yield
    except ScheduleError as error:
        found = (replace(d, span=span, help=(*d.help, *helps)) for d in error.diagnostics)
        raise ScheduleError(found) from error


def _virtual_stages(resolved: Resolved) -> int | None:
    virtual = resolved.plan.pipeline.virtual_stages
    return virtual if virtual > 1 else None


def _span(resolved: Resolved) -> Span | None:
    plan = resolved.plan
    return plan.span("pipeline.max_in_flight") or plan.span("pipeline.schedule")


def _from_file(name: str, resolved: Resolved) -> Schedule:
    """Return a file's compute actions; transfers and storage actions are always made anew."""
    span = resolved.plan.span("pipeline.schedule")
    schedule = _read(name, span)
    _check_fit(name, schedule, resolved, span)
    schedule = schedule.only(COMPUTE)
    problems = find_problems(schedule, accumulation="any")
    if problems:
        raise ScheduleError(f"`{name}`: {problems[0]}", span=span, notes=problems[1:4])
    if resolved.plan.pipeline.accumulation_order == "microbatch":
        _check_order(name, schedule, span)
    return schedule


def _read(name: str, span: Span | None) -> Schedule:
    path = _find(Path(name), span)
    with _placed(span, *(() if path.exists() else (LOOKED_FOR,))):
        return read_schedule(path, name)


def _check_order(name: str, schedule: Schedule, span: Span | None) -> None:
    late = find_problems(schedule)
    if late:
        raise ScheduleError(
            f"`{name}`: {late[0]}",
            span=span,
            help="`accumulation_order = schedule` adds gradients in the order of the file",
        )


def _find(path: Path, span: Span | None) -> Path:
    """Return a path as given where that exists, else beside the plan that names it."""
    beside = path if span is None else Path(span.source.name).parent / path
    return path if path.exists() or not beside.exists() else beside


def _check_fit(name: str, schedule: Schedule, resolved: Resolved, span: Span | None) -> None:
    found = (schedule.num_ranks, schedule.num_microbatches)
    wanted = (resolved.mesh.size("pp"), resolved.num_microbatches)
    if found != wanted:
        raise ScheduleError(
            f"`{name}` is for {found[0]} ranks and {found[1]} microbatches, "
            f"the plan has pp = {wanted[0]} and {wanted[1]}",
            span=span,
        )
    virtual = _virtual_stages(resolved)
    if virtual is not None and schedule.num_stages != found[0] * virtual:
        raise ScheduleError(
            f"`{name}` has {schedule.num_stages} stages on {found[0]} ranks, "
            f"the plan says virtual_stages = {virtual}",
            span=span,
            help="leave `virtual_stages` out: the file says how many stages a rank holds",
        )
