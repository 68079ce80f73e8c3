"""Placements: how one value lies over one mesh axis, and the arithmetic of shards.

The words are DTensor's. ``Shard`` carries ``blocks``, which DTensor lacks: the sizes of the pieces
along ``dim`` that are *each* split over the axis. A fused q|k|v of 3 x 64 columns over two ranks
gives rank 0 columns 0..31, 64..95 and 128..159: ``Shard(1, (64, 64, 64))``. A merged batch x head
dimension of 2 samples and 8 heads is ``Shard(0, (8, 8))``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autoshard.diagnostics import PlacementError
from autoshard.mesh import Mesh


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the whole value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Shard:
    """Each rank holds 1/n of every block along ``dim``; no ``blocks`` means one block."""

    dim: int
    blocks: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.blocks:
            return f"S({self.dim})"
        if len(set(self.blocks)) == 1:
            return f"S({self.dim}, {len(self.blocks)}x{self.blocks[0]})"
        return f"S({self.dim}, {'|'.join(map(str, self.blocks))})"


@dataclass(frozen=True)
class Partial:
    """Every rank holds a term; the value is their sum."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


Placement = Replicate | Shard | Partial
Placements = Mapping[str, Placement]  # mesh axis -> placement; an absent axis is Replicate

REPLICATE = Replicate()
PARTIAL = Partial()


def normalize(shard: Shard, extent: int) -> Shard:
    """Drop ``blocks`` that say nothing: one block that is the whole dimension."""
    return Shard(shard.dim) if shard.blocks == (extent,) else shard


def blocks_of(shard: Shard, extent: int) -> tuple[int, ...]:
    """Return the global block sizes along ``shard.dim`` of a value ``extent`` long there."""
    blocks = shard.blocks or (extent,)
    if sum(blocks) != extent:
        raise PlacementError(f"blocks {blocks} do not fill a dimension of {extent}")
    return blocks


def divides(shard: Shard, shape: Sequence[int], size: int) -> bool:
    """Tell whether every block along ``shard.dim`` splits evenly over ``size`` ranks."""
    return all(block % size == 0 for block in blocks_of(shard, shape[shard.dim]))


def local_shape(shape: Sequence[int], placements: Placements, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape one rank holds of a value of global ``shape``."""
    local = list(shape)
    for axis, placement in placements.items():
        if isinstance(placement, Shard):
            local[placement.dim] //= mesh.size(axis)
    return tuple(local)


def take_shard(value: torch.Tensor, shard: Shard, index: int, size: int) -> torch.Tensor:
    """Return rank ``index``'s part of a whole ``value`` (a view when there is one block)."""
    blocks = blocks_of(shard, value.shape[shard.dim])
    if any(block % size for block in blocks):
        raise PlacementError(f"blocks {blocks} can't be split over {size} ranks")
    if len(blocks) == 1:
        step = blocks[0] // size
        return value.narrow(shard.dim, index * step, step)
    if len(set(blocks)) == 1:
        step = blocks[0] // size
        wide = value.unflatten(shard.dim, (len(blocks), blocks[0]))
        return wide.narrow(shard.dim + 1, index * step, step).flatten(shard.dim, shard.dim + 1)
    pieces = value.split(list(blocks), shard.dim)
    parts = [
        p.narrow(shard.dim, index * (b // size), b // size)
        for p, b in zip(pieces, blocks, strict=True)
    ]
    return torch.cat(parts, shard.dim)


def join_shards(parts: Sequence[torch.Tensor], shard: Shard) -> torch.Tensor:
    """Return the whole value from the parts of all ranks: the inverse of ``take_shard``.

    ``shard.blocks`` are global sizes.
    """
    if len(shard.blocks) <= 1:
        return torch.cat(list(parts), shard.dim)
    size = len(parts)
    local = [block // size for block in shard.blocks]
    split = [part.split(local, shard.dim) for part in parts]
    return torch.cat([piece for block in zip(*split, strict=True) for piece in block], shard.dim)


def shard_tensor(
    value: torch.Tensor, placements: Placements, mesh: Mesh, coordinate: Mapping[str, int]
) -> torch.Tensor:
    """Return what the rank at ``coordinate`` holds of a whole ``value``, over all axes."""
    for axis in mesh.axes:
        placement = placements.get(axis.name, REPLICATE)
        if isinstance(placement, Shard):
            value = take_shard(value, placement, coordinate[axis.name], axis.size)
    return value
