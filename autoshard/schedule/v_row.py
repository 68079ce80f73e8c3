"""Write one rank of a V-shaped schedule: chunk 0 goes down the ranks, chunk 1 comes back."""

from collections import Counter
from collections.abc import Iterable

from autoshard.schedule.action import Action, Kind


class VRow:
    """Collect a rank's actions; each (kind, chunk) counts its own micro-batches."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        """Begin with no action; chunk 0 is stage `rank`, chunk 1 its mirror image."""
        self.actions: list[Action] = []
        self._stages = (rank, 2 * num_ranks - 1 - rank)
        self._counts: Counter[tuple[Kind, int]] = Counter()

    def count(self, kind: Kind, chunk: int) -> int:
        """Return how many micro-batches have done `kind` on `chunk`."""
        return self._counts[kind, chunk]

    def add(self, kind: Kind, chunk: int) -> None:
        """Add `kind` of the chunk's next micro-batch; B counts as I and W."""
        parts = (Kind.I, Kind.W) if kind is Kind.B else (kind,)
        self.actions.append(Action(kind, self._stages[chunk], self._counts[parts[0], chunk]))
        self._counts.update((part, chunk) for part in parts)

    def add_all(self, chunk: int, *kinds: Kind) -> None:
        """Add several kinds of one chunk, one after the other."""
        for kind in kinds:
            self.add(kind, chunk)


def only_first(num_microbatches: int, row: Iterable[Action]) -> list[Action]:
    """Return the row without later micro-batches: none waits for another, so it stays valid."""
    return [a for a in row if a.microbatch is not None and a.microbatch < num_microbatches]
