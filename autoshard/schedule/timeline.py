"""Run the compute actions of a schedule on a clock: each as early as its rank and inputs allow."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.diagnostics import ScheduleError
from autoshard.schedule.action import COMPUTE, Action, Kind
from autoshard.schedule.costs import Costs, Number
from autoshard.schedule.schedule import Schedule

Key = tuple[str, int, int]  # "F", "I" or "W", stage, micro-batch


@dataclass(frozen=True)
class Timed:
    """Say when a rank does an action."""

    rank: int
    action: Action
    start: Number
    end: Number


def run_clock(schedule: Schedule, costs: Costs) -> tuple[tuple[Timed, ...], ...]:
    """Return each rank's compute actions with their times, in program order.

    Transfers between ranks take `costs.send` and never hold up the rank that sends. Raise
    ScheduleError where actions wait for each other in a circle, or for one that is nowhere.
    """
    costs.check(schedule.num_stages)
    rows = [[a for a in row if a.kind in COMPUTE] for row in schedule.ranks]
    done: dict[Key, Number] = {}
    waiting: defaultdict[Key, list[int]] = defaultdict(list)
    timed: list[list[Timed]] = [[] for _ in rows]
    awake = list(range(len(rows)))
    while awake:
        rank = awake.pop()
        missing = _advance(schedule, costs, rank, rows[rank], timed[rank], done)
        if missing is not None:
            waiting[missing].append(rank)
        fresh = [key for key in waiting if key in done]
        awake += [waiter for key in fresh for waiter in waiting.pop(key)]
    _refuse_stuck(rows, timed, waiting)
    return tuple(tuple(row) for row in timed)


def produces(action: Action) -> tuple[str, ...]:
    """Return the phases whose results exist after a compute action: B makes both I and W."""
    return ("I", "W") if action.kind is Kind.B else (action.kind.value,)


def needs(schedule: Schedule, action: Action) -> Iterator[tuple[Key, int | None]]:
    """Yield what a compute action reads: the result, and the boundary it crosses between ranks.

    The boundary is the lower one of the two stages, None on the same rank.
    """
    stage, number = action.stage, action.microbatch
    assert number is not None
    if action.kind is Kind.F and stage > 0:
        yield ("F", stage - 1, number), _boundary(schedule, stage - 1)
    if action.kind is Kind.W:
        yield ("I", stage, number), None
    if action.kind in (Kind.I, Kind.B):
        yield ("F", stage, number), None
        if stage + 1 < schedule.num_stages:
            yield ("I", stage + 1, number), _boundary(schedule, stage)


def _boundary(schedule: Schedule, stage: int) -> int | None:
    placement = schedule.stage_to_rank
    return None if placement[stage] == placement[stage + 1] else stage


def _advance(
    schedule: Schedule,
    costs: Costs,
    rank: int,
    row: list[Action],
    timed: list[Timed],
    done: dict[Key, Number],
) -> Key | None:
    """Run a rank's actions until one misses a result; return that result, None at the end."""
    for action in row[len(timed) :]:
        start: Number = timed[-1].end if timed else 0
        for key, boundary in needs(schedule, action):
            if key not in done:
                return key
            delay = 0 if boundary is None else costs.transfer(boundary)
            start = max(start, done[key] + delay)
        end = start + costs.of(action)
        timed.append(Timed(rank, action, start, end))
        assert action.microbatch is not None
        done.update({(word, action.stage, action.microbatch): end for word in produces(action)})
    return None


def _refuse_stuck(
    rows: list[list[Action]], timed: list[list[Timed]], waiting: dict[Key, list[int]]
) -> None:
    stuck = [
        f"rank {rank} at {rows[rank][len(timed[rank])]} waits for {stage}{word}{number}"
        for (word, stage, number), ranks in waiting.items()
        for rank in ranks
    ]
    if stuck:
        raise ScheduleError(
            f"the schedule can't run: {'; '.join(stuck)}",
            help="put every action after the ones whose results it reads, on every rank",
        )
