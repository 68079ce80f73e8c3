"""What a reshape does to a shard: pure arithmetic on row-major index spaces.

A shard along dim ``i`` cuts the flat index space into blocks, each split over the ranks. After a
reshape the same cut must be a cut along one output dim ``j``: the dims before ``j`` count whole
groups of blocks, the dims behind it divide every rank's piece. For two ranks

    [2, 8, 4] S(1)          -> [16, 4]     S(0, (8, 8))      batch and heads merged
    [2, 96]   S(1, (32,)*3) -> [2, 3, 32]  S(2)              packed q|k|v taken apart
    [2, 32]   S(1)          -> [2, 8, 4]   S(1)              heads; refused for 16 ranks
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from autoshard.ir.placement import Shard, normalize

# A longer list of blocks would cost more to describe than the gather costs to run.
MAX_BLOCKS = 4096


@lru_cache(maxsize=4096)
def reshape_shard(
    shard: Shard, before: tuple[int, ...], after: tuple[int, ...], size: int
) -> Shard | None:
    """Return how a value split as ``shard`` lies after a reshape, or None when it can't be kept.

    ``size`` is what every block must be divisible by; with 1 the first fitting dim is taken.
    """
    extent = before[shard.dim]
    blocks = shard.blocks or (extent,)
    if sum(blocks) != extent:
        return _keep_padded(shard, before, after)
    for dim in range(len(after)):
        found = _blocks_along(dim, blocks, shard.dim, before, after)
        if found and sum(found) == after[dim] and all(b % size == 0 for b in found):
            return normalize(Shard(dim, found), after[dim])
    return None


def _blocks_along(
    dim: int, blocks: tuple[int, ...], at: int, before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the block sizes that the cut makes along output ``dim``, or None."""
    outer_before, outer_after = prod(before[:at]), prod(after[:dim])
    inner_before, inner_after = prod(before[at + 1 :]), prod(after[dim + 1 :])
    blocks = _regroup(blocks, outer_before, outer_after)
    if not blocks or len(blocks) > MAX_BLOCKS:
        return None
    flat = [block * inner_before for block in blocks]
    if any(length % inner_after for length in flat):
        return None
    return tuple(length // inner_after for length in flat)


def _regroup(blocks: tuple[int, ...], before: int, after: int) -> tuple[int, ...]:
    """Return the blocks of one group when ``before`` groups of them become ``after`` groups."""
    if before % after == 0:
        return blocks * (before // after)
    times, rest = divmod(after, before)
    if rest or len(blocks) % times:
        return ()
    period = len(blocks) // times
    return blocks[:period] if blocks == blocks[:period] * times else ()


def _keep_padded(shard: Shard, before: tuple[int, ...], after: tuple[int, ...]) -> Shard | None:
    """Return a padded shard's place: its dim must come through whole."""
    outer, extent = prod(before[: shard.dim]), before[shard.dim]
    for dim in range(len(after)):
        if after[dim] == extent and prod(after[:dim]) == outer:
            return Shard(dim, shard.blocks)
    return None
