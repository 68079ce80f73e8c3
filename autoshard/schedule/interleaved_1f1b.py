"""Interleaved 1F1B: several stages on a rank, to divide the bubble (Narayanan et al. 2021).

Micro-batches go through a rank's stages in groups of at least one per rank. The groups need not be
equal, so that any number of micro-batches keeps the bubble at (p-1) / (v m + p-1) from m = p on.
"""

from collections.abc import Iterator

from autoshard.schedule.action import Action, Kind


def interleaved_1f1b(
    num_ranks: int, num_microbatches: int, virtual_stages: int
) -> list[list[Action]]:
    """Return each rank's actions; the first rank holds most, (v+1) p - 1 stage activations."""
    sizes = _group_sizes(num_ranks, num_microbatches)
    forward = list(_order(sizes, range(virtual_stages)))
    backward = list(_order(sizes, reversed(range(virtual_stages))))
    rows = []
    for rank in range(num_ranks):
        fs = [Action(Kind.F, chunk * num_ranks + rank, number) for chunk, number in forward]
        bs = [Action(Kind.B, chunk * num_ranks + rank, number) for chunk, number in backward]
        warmup = 2 * (num_ranks - 1 - rank) + (virtual_stages - 1) * sizes[0]
        rows.append(_alternate(fs, bs, min(warmup, len(fs))))
    return rows


def _group_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """Return groups of at least one micro-batch a rank, as equal as can be, largest first."""
    groups = max(1, num_microbatches // num_ranks)
    size, more = divmod(num_microbatches, groups)
    return [size + 1] * more + [size] * (groups - more)


def _order(sizes: list[int], chunks: range | Iterator[int]) -> Iterator[tuple[int, int]]:
    """Yield (chunk, micro-batch): each group through all chunks, then the next group."""
    order = tuple(chunks)
    first = 0
    for size in sizes:
        for chunk in order:
            yield from ((chunk, first + place) for place in range(size))
        first += size


def _alternate(forward: list[Action], backward: list[Action], warmup: int) -> list[Action]:
    row = forward[:warmup]
    for place in range(len(forward) - warmup):
        row += [forward[warmup + place], backward[place]]
    return row + backward[len(forward) - warmup :]
