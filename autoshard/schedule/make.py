"""Make any schedule by name: the one table of schedules and what they ask for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoshard.diagnostics import ScheduleError
from autoshard.schedule.action import Action
from autoshard.schedule.costs import UNIT, Costs
from autoshard.schedule.gpipe import gpipe
from autoshard.schedule.one_f_one_b import one_f_one_b
from autoshard.schedule.placement import in_loops
from autoshard.schedule.schedule import Schedule


@dataclass(frozen=True)
class Request:
    """Hold what was asked of a generator."""

    num_ranks: int
    num_microbatches: int
    virtual_stages: int
    max_in_flight: int | None
    costs: Costs


@dataclass(frozen=True)
class Recipe:
    """Describe one schedule: its generator, its placement, how many stages a rank holds."""

    rows: Callable[[Request], Sequence[Sequence[Action]]]
    summary: str
    placement: Callable[[int, int], tuple[int, ...]] = in_loops
    virtual_stages: tuple[int, ...] = (1,)  # allowed; the first is the default; () means any
    splits_backward: bool = False  # has I and W instead of B


SCHEDULES: dict[str, Recipe] = {
    "gpipe": Recipe(
        lambda r: gpipe(r.num_ranks, r.num_microbatches), "all forwards, then all backwards"
    ),
    "1f1b": Recipe(
        lambda r: one_f_one_b(r.num_ranks, r.num_microbatches), "a backward after each forward"
    ),
}


def make_schedule(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    virtual_stages: int | None = None,
    max_in_flight: int | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """Return the compute actions of a schedule, for any number of microbatches.

    `virtual_stages` is the number of stages a rank holds; None asks for the schedule's own.
    `max_in_flight` bounds the activations a rank holds, counted in microbatches of all its
    stages; `costs` steer the schedules that are searched for (zb_2p). Every schedule accumulates
    each stage's weight gradients in microbatch order.
    """
    recipe = _recipe(name)
    for what, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ScheduleError(f"{name} needs {what} of at least 1; got {value}")
    virtual = _virtual_stages(name, recipe, virtual_stages)
    request = Request(num_ranks, num_microbatches, virtual, max_in_flight, costs or UNIT)
    request.costs.check(num_ranks * virtual)
    rows = tuple(tuple(row) for row in recipe.rows(request))
    placement = recipe.placement(num_ranks, virtual)
    return Schedule(name, num_ranks * virtual, num_microbatches, placement, rows)


def _recipe(name: str) -> Recipe:
    if name not in SCHEDULES:
        raise ScheduleError(f"no schedule '{name}'", help=f"there are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def _virtual_stages(name: str, recipe: Recipe, asked: int | None) -> int:
    allowed = recipe.virtual_stages
    if asked is None:
        return allowed[0]
    if asked not in allowed:
        words = " or ".join(str(number) for number in allowed)
        raise ScheduleError(f"{name} needs virtual_stages {words}; got {asked}")
    return asked
