"""One step of one rank, as the proof of order sees it."""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

EventKind = Literal["compute", "collective", "send", "recv", "wait"]
Semantics = Literal["rendezvous", "streams"]

TRANSFERS = ("send", "recv")
MEETINGS = ("collective", *TRANSFERS)


class Event(NamedTuple):
    """Do one step on one rank.

    `group` is the ranks of a collective in order, or (source, target) of a transfer. `tag` says
    what is done and must be equal for all who take part (put shape and dtype in it, and a wrong
    size is found too). `where` is for the reader: action, node, plan line. Neighbouring transfers
    of a rank with the same `batch` above 0 are posted together. A `wait` names, by group and tag,
    an earlier collective or receive that compute needs now; one that no wait names is waited for
    by the rank's next compute.
    """

    rank: int
    kind: EventKind
    group: tuple[int, ...] = ()
    tag: str = ""
    where: str = ""
    batch: int = 0

    def __str__(self) -> str:
        """Return the place where there is one, else the tag."""
        return self.where or self.tag or self.kind


def pair_waits(program: Sequence[Event]) -> dict[int, int | None]:
    """Return for the place of each wait that of what it waits for, None where nothing is left.

    A wait takes the earliest collective or receive of its group and tag that is still unnamed.
    """
    started: defaultdict[tuple[tuple[int, ...], str], deque[int]] = defaultdict(deque)
    pairs: dict[int, int | None] = {}
    for place, event in enumerate(program):
        queue = started[event.group, event.tag]
        if event.kind == "wait":
            pairs[place] = queue.popleft() if queue else None
        elif event.kind in ("collective", "recv"):
            queue.append(place)
    return pairs
