"""ZB-2p: the best zero-bubble schedule that fits a memory bound (Qi et al. 2023, section 3).

Known patterns that keep to the bound compete with a search that knows the costs, so the result is
never worse than ZB-H1 and ZB-H2 under their memory. ZB-1p is the same with a bound of p.
"""

from collections.abc import Iterator
from itertools import chain

from autoshard.schedule.action import Action
from autoshard.schedule.costs import Costs
from autoshard.schedule.placement import in_loops
from autoshard.schedule.search import Problem, Rows, best, candidates
from autoshard.schedule.split_backward import split_row


def zb_2p(
    num_ranks: int, num_microbatches: int, max_in_flight: int | None, costs: Costs
) -> list[list[Action]]:
    """Return each rank's actions under a bound of `max_in_flight`, 2 per rank by default."""
    limit = 2 * num_ranks if max_in_flight is None else max_in_flight
    problem = Problem(in_loops(num_ranks, 1), num_microbatches, costs.whole(), limit)
    rows = best(problem, chain(_patterns(num_ranks, num_microbatches, limit), candidates(problem)))
    assert rows is not None, "the pattern for the whole bound always fits"
    return rows


def _patterns(num_ranks: int, num_microbatches: int, limit: int) -> Iterator[Rows]:
    """Yield what lies between ZB-H1 (p activations) and ZB-H2 (2p - 1), and below ZB-H1."""
    for held in sorted({limit, min(limit, num_ranks), min(limit, 2 * num_ranks - 1)}):
        yield [_row(rank, num_ranks, num_microbatches, held) for rank in range(num_ranks)]


def _row(rank: int, num_ranks: int, num_microbatches: int, held: int) -> list[Action]:
    to_come = num_ranks - rank
    more = max(0, min(held - num_ranks, to_come - 1))
    warmup = min(held, to_come + more)
    return split_row(rank, num_microbatches, warmup, lag=held - warmup)
