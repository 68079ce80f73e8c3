"""Parameters described, not held: global shape, placement, storage, home stages, tied names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from autoshard.ir.placement import Placements, Shard, local_shape
from autoshard.mesh import Mesh


@dataclass(frozen=True)
class Whole:
    """The rank stores its whole local parameter, in a flat buffer of its own bucket."""

    bucket: str = ""
    offset: int = 0  # elements


@dataclass(frozen=True)
class Flat:
    """The bucket is cut in equal 1-D shards over ``axis``; the parameter lies at ``offset``."""

    bucket: str
    offset: int  # elements from the start of the gathered bucket
    length: int  # elements
    axis: str = "dp"


@dataclass(frozen=True)
class Copies:
    """Each of ``pieces`` equal pieces along ``dim`` is kept ``times`` times, side by side.

    So a few key heads are split over more ranks: neighbouring ranks hold the same head. In a packed
    q|k|v the first ``own`` elements (queries) have no copies; ``parts`` parts of so many pieces
    (keys, values) follow.
    """

    dim: int
    pieces: int
    times: int
    own: int = 0
    parts: int = 1

    def repeat(self, value: torch.Tensor) -> torch.Tensor:
        """Return the model's value with every piece repeated."""
        own, rest = value.tensor_split([self.own], self.dim)
        wide = rest.unflatten(self.dim, (self.parts * self.pieces, -1))
        wide = wide.repeat_interleave(self.times, self.dim).flatten(self.dim, self.dim + 1)
        return torch.cat((own, wide), self.dim) if self.own else wide

    def first(self, value: torch.Tensor) -> torch.Tensor:
        """Return the first copy of every piece: the inverse of ``repeat``."""
        own, rest = value.tensor_split([self.own], self.dim)
        wide = rest.unflatten(self.dim, (self.parts * self.pieces, self.times, -1))
        wide = wide.select(self.dim + 1, 0).flatten(self.dim, self.dim + 1)
        return torch.cat((own, wide), self.dim) if self.own else wide

    def lengthened(self, extent: int) -> int:
        """Return the extent along ``dim`` with all copies."""
        return self.own + (extent - self.own) * self.times

    @property
    def is_whole(self) -> bool:
        """Tell whether each rank holds all that has copies: the only head."""
        return self.pieces == 1

    @property
    def own_rows(self) -> int:
        """Return how many rows of one rank's part come before the copies; they are along dim 0."""
        return self.own // (self.pieces * self.times)


@dataclass(frozen=True)
class ParamSpec:
    """One parameter or buffer of the model, whatever the number of names it is tied to."""

    fqn: str  # the canonical (first) name
    shape: tuple[int, ...]  # global, as in the user's model
    dtype: torch.dtype
    requires_grad: bool = True
    is_buffer: bool = False
    persistent: bool = True  # buffers: in the state dict; lifted constants are not
    aliases: tuple[str, ...] = ()  # further names of the same tensor
    padded: tuple[int, ...] | None = None  # shape after `pad=`, None when nothing is padded
    is_widened: bool = False  # the graph computes with the padding, as with so many more heads
    copies: Copies | None = None  # key heads that several ranks hold
    placements: Placements = field(default_factory=dict)
    computed_in: torch.dtype | None = None  # what phases read; None: as it is stored
    homes: tuple[int, ...] = ()  # stages that use it; the first one owns it
    storage: Whole | Flat = Whole()

    @property
    def read_dtype(self) -> torch.dtype:
        """Return the dtype in which phases read the parameter; ``dtype`` is how it is stored."""
        return self.computed_in or self.dtype

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Return the global shape including padding and copies."""
        if self.copies is None:
            return self.padded or self.shape
        shape = list(self.shape)
        shape[self.copies.dim] = self.copies.lengthened(shape[self.copies.dim])
        return tuple(shape)

    def pad(self, value: torch.Tensor) -> torch.Tensor:
        """Return the model's value with the zeros of its padding, or with its copies."""
        if self.copies is not None:
            return self.copies.repeat(value)
        if self.padded is None:
            return value
        whole = value.new_zeros(self.padded)
        for dim, real, start, length in self._pieces():
            whole.narrow(dim, start, length).copy_(value.narrow(dim, real, length))
        return whole

    def unpad(self, value: torch.Tensor) -> torch.Tensor:
        """Return the part of a padded or repeated value that the user's model has."""
        if self.copies is not None:
            return self.copies.first(value)
        if self.padded is None:
            return value
        parts = [value.narrow(dim, start, length) for dim, _, start, length in self._pieces()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.padded_dim)

    @property
    def padded_dim(self) -> int:
        """Return the dimension that is padded; raises when none is."""
        assert self.padded is not None
        pairs = zip(self.shape, self.padded, strict=True)
        return next(dim for dim, (real, whole) in enumerate(pairs) if real != whole)

    def _pieces(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield dim, real start, padded start and real length of each block.

        Every block is padded at its end, all of them in the same proportion.
        """
        assert self.padded is not None
        dim = self.padded_dim
        real, whole = self.shape[dim], self.padded[dim]
        shard = next((p for p in self.placements.values() if isinstance(p, Shard)), Shard(dim))
        start = 0
        for block in shard.blocks or (whole,):
            yield dim, start * real // whole, start, block * real // whole
            start += block

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of the tensor-parallel shard that one rank computes with."""
        return local_shape(self.whole_shape, self.placements, mesh)

    def is_sharded(self, axis: str) -> bool:
        """Tell whether the ranks of ``axis`` compute with different parts."""
        return isinstance(self.placements.get(axis), Shard)


class ParamTable:
    """An ordered map from fully qualified name to ParamSpec; tied names lead to one spec."""

    def __init__(self, specs: tuple[ParamSpec, ...] = ()) -> None:
        self._specs = {spec.fqn: spec for spec in specs}
        self._canonical = {name: s.fqn for s in specs for name in (s.fqn, *s.aliases)}

    def __iter__(self) -> Iterator[ParamSpec]:
        return iter(self._specs.values())

    def __len__(self) -> int:
        return len(self._specs)

    def __contains__(self, name: str) -> bool:
        return name in self._canonical

    def __getitem__(self, name: str) -> ParamSpec:
        return self._specs[self._canonical[name]]

    def update(self, name: str, **changes: object) -> ParamSpec:
        """Replace fields of the spec that ``name`` leads to and return the new spec."""
        spec = replace(self[name], **changes)
        self._specs[spec.fqn] = spec
        return spec

    def trainable(self) -> tuple[ParamSpec, ...]:
        """Return the parameters that get a gradient."""
        return tuple(s for s in self if s.requires_grad and not s.is_buffer)

    def clone(self) -> ParamTable:
        """Return an independent table of the same specs."""
        return ParamTable(tuple(self))
