"""DualPipeV: two stages a rank in a V, forwards of one beside backwards of the other.

From DeepSeek-V3's DualPipe, cut in half (2025). In its steady state a rank pairs the forward of
one stage with the whole backward of its other stage, which a run-time may overlap: one computes
while the other communicates. Backwards are split at both ends only, where that shortens the step.
"""

from autoshard.schedule.action import Action, Kind
from autoshard.schedule.v_row import VRow, only_first


def dualpipev(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Return each rank's actions; each rank holds at most `2 * num_ranks + 1` stage activations.

    The pattern needs two micro-batches a rank; fewer are the same pattern with the rest left out.
    """
    full = max(num_microbatches, 2 * num_ranks)
    return [only_first(num_microbatches, _row(rank, num_ranks, full)) for rank in range(num_ranks)]


def _row(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    row = VRow(rank, num_ranks)
    after = num_ranks - 1 - rank  # ranks after this one
    for _ in range(2 * after):
        row.add(Kind.F, 0)
    for _ in range(rank + 1):
        row.add(Kind.F, 0)
        row.add(Kind.F, 1)
    for _ in range(after):
        row.add_all(1, Kind.I, Kind.W, Kind.F)
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        for chunk in (0, 1):
            row.add(Kind.F, chunk)
            row.add(Kind.B, 1 - chunk)
    for _ in range(after):
        row.add(Kind.B, 1)
        row.add(Kind.F, 1)
        row.add(Kind.B, 0)
    _end(row, rank, after)
    return row.actions


def _end(row: VRow, rank: int, after: int) -> None:
    """Add the backwards that are left: whole ones, then split ones with W put off."""
    waiting: list[int] = []  # chunks whose weight gradients were put off, in order
    for place in range(2 * (rank + 1)):
        chunk = 1 - place % 2
        if place <= rank:
            row.add(Kind.B, chunk)
        else:
            row.add(Kind.I, chunk)
            waiting.append(chunk)
    for _ in range(after):
        row.add(Kind.W, waiting.pop(0))
        row.add(Kind.I, 0)
        waiting.append(0)
    for chunk in waiting:
        row.add(Kind.W, chunk)
