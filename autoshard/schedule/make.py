"""Make any schedule by name: the one table of schedules and what they ask for."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoshard.diagnostics import ScheduleError
from autoshard.schedule.action import Action
from autoshard.schedule.costs import UNIT, Costs
from autoshard.schedule.dualpipev import dualpipev
from autoshard.schedule.gpipe import gpipe
from autoshard.schedule.interleaved_1f1b import interleaved_1f1b
from autoshard.schedule.one_f_one_b import one_f_one_b
from autoshard.schedule.placement import in_a_v, in_loops
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.simulate import simulate
from autoshard.schedule.zb_2p import zb_2p
from autoshard.schedule.zb_h1 import zb_h1
from autoshard.schedule.zb_h2 import zb_h2
from autoshard.schedule.zbv import zbv


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
    virtual_stages: tuple[int | None, ...] = (1,)  # allowed, the default first; None: any
    is_bounded: bool = False  # keeps to max_in_flight by itself


SCHEDULES: dict[str, Recipe] = {
    "gpipe": Recipe(
        lambda r: gpipe(r.num_ranks, r.num_microbatches), "all forwards, then all backwards"
    ),
    "1f1b": Recipe(
        lambda r: one_f_one_b(r.num_ranks, r.num_microbatches), "a backward after each forward"
    ),
    "interleaved_1f1b": Recipe(
        lambda r: interleaved_1f1b(r.num_ranks, r.num_microbatches, r.virtual_stages),
        "1f1b over several stages a rank",
        virtual_stages=(2, None),
    ),
    "zb_h1": Recipe(
        lambda r: zb_h1(r.num_ranks, r.num_microbatches), "split backward, memory of 1f1b"
    ),
    "zb_h2": Recipe(
        lambda r: zb_h2(r.num_ranks, r.num_microbatches), "split backward, twice that memory"
    ),
    "zb_2p": Recipe(
        lambda r: zb_2p(r.num_ranks, r.num_microbatches, r.max_in_flight, r.costs),
        "split backward, searched for under a memory bound",
        is_bounded=True,
    ),
    "zbv": Recipe(
        lambda r: zbv(r.num_ranks, r.num_microbatches, r.max_in_flight, r.costs),
        "split backward, two stages a rank in a V",
        in_a_v,
        virtual_stages=(2, 1),
        is_bounded=True,
    ),
    "dualpipev": Recipe(
        lambda r: dualpipev(r.num_ranks, r.num_microbatches),
        "a V with forwards beside backwards",
        in_a_v,
        virtual_stages=(2, 1),
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
    """Return the compute actions of a schedule, for any number of micro-batches.

    `virtual_stages` is the number of stages a rank holds; None asks for the schedule's own, and
    the V-shaped ones have 2 whether asked for 1 (a plan's default) or 2. `max_in_flight` bounds
    the activations a rank holds, in micro-batches of all its stages; zb_2p and zbv keep to it, the
    others refuse a bound that they don't meet. `costs` steer what is searched for (zb_2p, and zbv
    below two micro-batches a rank). Every schedule accumulates each stage's weight gradients in
    micro-batch order.
    """
    recipe = _recipe(name)
    for what, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ScheduleError(f"{name} needs {what} of at least 1; got {value}")
    if max_in_flight is not None and max_in_flight < 1:
        raise ScheduleError(f"{name} needs max_in_flight of at least 1; got {max_in_flight}")
    virtual = _virtual_stages(name, recipe, virtual_stages)
    request = Request(num_ranks, num_microbatches, virtual, max_in_flight, costs or UNIT)
    request.costs.check(num_ranks * virtual)
    rows = tuple(tuple(row) for row in recipe.rows(request))
    placement = recipe.placement(num_ranks, virtual)
    schedule = Schedule(name, num_ranks * virtual, num_microbatches, placement, rows)
    if not recipe.is_bounded:
        _check_bound(schedule, request)
    return schedule


def place_stages(name: str, num_ranks: int, virtual_stages: int | None = None) -> tuple[int, ...]:
    """Return the rank of every stage without making the schedule."""
    recipe = _recipe(name)
    return recipe.placement(num_ranks, _virtual_stages(name, recipe, virtual_stages))


def _check_bound(schedule: Schedule, request: Request) -> None:
    if request.max_in_flight is None:
        return
    held = max(simulate(schedule, request.costs).peak_in_flight(request.costs.kept))
    needed = math.ceil(held / schedule.virtual_stages)
    if needed > request.max_in_flight:
        raise ScheduleError(
            f"{schedule.name} on {schedule.num_ranks} ranks holds {needed} micro-batches in "
            f"flight, more than max_in_flight {request.max_in_flight}",
            help="zb_2p and zbv keep to a bound; fewer pipeline ranks need less",
        )


def _recipe(name: str) -> Recipe:
    if name not in SCHEDULES:
        raise ScheduleError(f"no schedule '{name}'", help=f"there are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def _virtual_stages(name: str, recipe: Recipe, asked: int | None) -> int:
    default, *others = recipe.virtual_stages
    assert default is not None
    if asked is None:
        return default
    if asked < 1 or not (asked in recipe.virtual_stages or None in others):
        words = "at least 1" if None in others else str(default)
        raise ScheduleError(f"{name} needs virtual_stages {words}; got {asked}")
    return asked if None in others else default
