"""Prove that ranks never wait for each other in a circle, or show the circle.

What each rank does is a list of events. Collectives on one group meet in the order in which each
member issues them, transfers on one channel in first-in-first-out order; that fixes which events
are one and the same, and these must have equal tags. A run exists exactly when "must be finished
before" among the events has no cycle, so the proof is a topological order.

Two semantics. ``rendezvous``: a rank does one event after the other, and each waits for its
partners; nothing is buffered. ``streams``: collectives are queued on one in-order stream per
group and all transfers of a rank on one stream; a rank's compute runs on unless it must wait, and
a send is waited for by nobody. Everything that ``streams`` orders ``rendezvous`` orders as well,
so a program without deadlock under rendezvous has none under streams.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autoshard.schedule.event import Event, Semantics
from autoshard.schedule.order_graph import Hold, find_cycle
from autoshard.schedule.order_match import match_events
from autoshard.schedule.order_quotient import one_of_each


@dataclass(frozen=True)
class OrderVerdict:
    """Say whether a run exists; if not, why, in words and as the events that hold each other up."""

    ok: bool
    semantics: Semantics
    num_ranks: int
    num_checked: int  # ranks that were looked at: one of each kind
    reason: Literal["", "mismatch", "missing", "cycle"] = ""
    message: str = ""
    events: tuple[Event, ...] = ()

    def __str__(self) -> str:
        """Return one line if good, else the message."""
        if not self.ok:
            return self.message
        return (
            f"no deadlock under {self.semantics}: {self.num_ranks} ranks, "
            f"{self.num_checked} of them different"
        )


def prove_order(
    programs: Sequence[Sequence[Event]], semantics: Semantics = "rendezvous"
) -> OrderVerdict:
    """Return whether the programs of all ranks (index = rank) admit a run without deadlock.

    Ranks that differ only by a shift along the mesh are checked once. Linear in the number of
    events.

    >>> a = [Event(0, "send", (0, 1), "x"), Event(0, "recv", (1, 0), "y")]
    >>> b = [Event(1, "send", (1, 0), "y"), Event(1, "recv", (0, 1), "x")]
    >>> print(prove_order([a, b]).message)
    deadlock under rendezvous: ranks 0 and 1 wait for each other
      rank 0 does 'y' only after 'x'
      rank 1 does 'x' only after 'y'
    """
    chosen = one_of_each(programs)
    matched = match_events(chosen)
    facts = (semantics, len(programs), len(chosen.programs))
    if matched.reason:
        return OrderVerdict(False, *facts, matched.reason, matched.message, matched.events)
    cycle = find_cycle(chosen, matched.nodes, semantics)
    if not cycle:
        return OrderVerdict(True, *facts)
    events = tuple(event for hold in cycle for event in (hold.first, hold.then))
    message = _in_words(semantics, cycle, len(programs), len(chosen.programs))
    return OrderVerdict(False, *facts, "cycle", message, events)


def _in_words(semantics: Semantics, cycle: Sequence[Hold], num_ranks: int, num_checked: int) -> str:
    cycle = _merged(cycle)
    ranks = sorted({hold.then.rank for hold in cycle})
    *most, last = [str(rank) for rank in ranks]
    who = f"ranks {', '.join(most)} and {last} wait for each other" if most else f"rank {last}"
    if num_checked < num_ranks:
        who += f" (each stands for those like it: {num_checked} kinds among {num_ranks} ranks)"
    lines = [
        f"  rank {hold.then.rank} does '{hold.then}' only after '{hold.first}'" for hold in cycle
    ]
    return "\n".join([f"deadlock under {semantics}: {who}", *lines])


def _merged(cycle: Sequence[Hold]) -> list[Hold]:
    """Join neighbouring holds of one rank into one, and begin with the lowest rank."""
    borders = [i for i, hold in enumerate(cycle) if hold.then.rank != cycle[i - 1].then.rank]
    start = min(borders, key=lambda place: cycle[place].then.rank, default=0)
    merged: list[Hold] = []
    for hold in (*cycle[start:], *cycle[:start]):
        if merged and merged[-1].then.rank == hold.then.rank:
            merged[-1] = Hold(merged[-1].first, hold.then)
        else:
            merged.append(hold)
    return merged
