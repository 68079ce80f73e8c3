"""ZBV: two stages a rank in a V, no bubble at F = I = W, 1F1B's memory (Qi et al. 2023).

The rank that holds the first stage holds the last one too, so its first input gradient comes soon
and the ranks begin and end within p-1 *half* forwards of each other.
"""

from itertools import chain

from autoshard.diagnostics import ScheduleError
from autoshard.schedule.action import Action, Kind
from autoshard.schedule.costs import Costs
from autoshard.schedule.placement import in_a_v
from autoshard.schedule.search import Problem, best, candidates
from autoshard.schedule.v_row import VRow, only_first


def zbv(
    num_ranks: int, num_microbatches: int, max_in_flight: int | None, costs: Costs
) -> list[list[Action]]:
    """Return each rank's actions; every rank holds at most `num_ranks` micro-batches.

    The pattern needs two micro-batches a rank and its memory. With fewer, or under a lower bound,
    the better of a search and of what is left of the pattern is taken.
    """
    full = max(num_microbatches, 2 * num_ranks)
    pattern = [
        only_first(num_microbatches, _row(rank, num_ranks, full)) for rank in range(num_ranks)
    ]
    limit = num_ranks if max_in_flight is None else max_in_flight
    if num_microbatches == full and limit >= num_ranks:
        return pattern
    problem = Problem(in_a_v(num_ranks), num_microbatches, costs.whole(), 2 * limit)
    rows = best(problem, chain([pattern], candidates(problem)))
    if rows is None:
        raise ScheduleError(
            f"zbv on {num_ranks} ranks finds no schedule with {limit} micro-batches in flight",
            help=f"{num_ranks} are always enough",
        )
    return rows


def _row(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    row = VRow(rank, num_ranks)
    to_come = num_ranks - rank
    # Until the first micro-batch has turned around and come back: forwards down, then both ways.
    for _ in range(2 * to_come - 1):
        row.add(Kind.F, 0)
    for _ in range(rank):
        row.add(Kind.F, 1)
        row.add(Kind.F, 0)
    # Until its input gradient has come down and back: the second stage alone.
    for _ in range(to_come):
        row.add_all(1, Kind.F, Kind.I, Kind.W)
    while row.count(Kind.F, 1) < num_microbatches:
        if row.count(Kind.F, 0) < num_microbatches:
            row.add(Kind.F, 0)
        row.add_all(0, Kind.I, Kind.W)
        row.add_all(1, Kind.F, Kind.I, Kind.W)
    # Weight gradients wait until the ranks after this one have all they need.
    for _ in range(rank):
        row.add(Kind.I, 0)
        row.add(Kind.I, 1)
    for _ in range(to_come):
        row.add_all(0, Kind.I, Kind.W)
    for chunk in (1, 0):
        while row.count(Kind.W, chunk) < num_microbatches:
            row.add(Kind.W, chunk)
    return row.actions
