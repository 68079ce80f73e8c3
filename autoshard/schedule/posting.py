"""When a rank posts its transfers: receives ahead of their turn, so that messages have a place.

The order of all transfers of a rank stays the schedule's own. So what is proved of the schedule,
where they are queued in that order, holds of what is posted: a receive only waits for less.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.schedule.action import COMPUTE, RECVS, SENDS, Action

AHEAD = 1  # compute actions before its turn at which a receive is posted at most
TRANSFERS = SENDS | RECVS


@dataclass
class _Step:
    """One action, or the transfers of one turn: what stands between two other actions."""

    turn: int
    actions: list[Action]

    @property
    def has_transfers(self) -> bool:
        return self.actions[0].kind in TRANSFERS


def posted(row: Iterable[Action]) -> tuple[tuple[Action, ...], ...]:
    """Return what a rank does, step by step: one action, or transfers that are posted at once.

    A receive comes up to ``AHEAD`` compute actions before its turn, behind the transfer before it.
    Only transfers that stand side by side in the row are posted at once: whoever waits for one of
    a batch may wait for all of it.

    >>> row = map(Action.parse, "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1".split())
    >>> print(*("+".join(map(str, step)) for step in posted(row)))
    1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1
    """
    steps: list[_Step] = []
    turn = 0
    for action in row:
        if action.kind not in TRANSFERS:
            turn += 1
        place = _ahead(steps) if action.kind in RECVS else len(steps)
        before = steps[place - 1] if place else None
        if before is not None and before.has_transfers and before.turn == turn:
            before.actions.append(action)
        else:
            steps.insert(place, _Step(turn, [action]))
    return tuple(tuple(step.actions) for step in steps)


def _ahead(steps: list[_Step]) -> int:
    """Return the place of a receive whose turn comes after ``steps``."""
    place, passed = len(steps), 0
    while place and not steps[place - 1].has_transfers:
        is_compute = steps[place - 1].actions[0].kind in COMPUTE
        if is_compute and passed == AHEAD:
            break
        passed += is_compute
        place -= 1
    return place
