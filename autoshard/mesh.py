"""The mesh: named axes over the ranks. Outermost axis first; the last axis is neighbouring ranks.

Everything here is integers: no process group, no torch.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from autoshard.diagnostics import MeshError

# Data parallel may be two axes (hybrid sharding): `dp` then means both of them together.
DATA_PARALLEL = ("dp_replicate", "dp_shard")

AxisName = str | tuple[str, ...]


def is_data_parallel(axis: str) -> bool:
    """Tell whether ranks along an axis read different samples.

    >>> is_data_parallel("dp_shard"), is_data_parallel("tp")
    (True, False)
    """
    return axis == "dp" or axis in DATA_PARALLEL


def covers(named: str, axis: str) -> bool:
    """Tell whether what happens over ``named`` happens along ``axis``: `dp` stands for its parts.

    >>> covers("dp", "dp_shard"), covers("dp_shard", "dp_replicate")
    (True, False)
    """
    return named == axis or (named == "dp" and axis in DATA_PARALLEL)


@dataclass(frozen=True)
class Axis:
    """Name one direction of the mesh and count its places."""

    name: str
    size: int


@dataclass(frozen=True)
class Mesh:
    """Arrange ranks along named axes, outermost first.

    >>> mesh = Mesh.of(pp=2, tp=2)
    >>> mesh.coordinate(2), mesh.group(2, "tp"), mesh.group(2, "pp")
    ({'pp': 1, 'tp': 0}, (2, 3), (0, 2))

    An axis that the mesh lacks has size 1. Where an axis is named, a tuple of names is their
    union, and `dp` is the union of `dp_replicate` and `dp_shard` on a mesh that has those.
    """

    axes: tuple[Axis, ...] = ()

    @classmethod
    def of(cls, **sizes: int) -> "Mesh":
        """Build a mesh from axis sizes in order, outermost first."""
        return cls(tuple(Axis(name, size) for name, size in sizes.items()))

    def __post_init__(self) -> None:
        """Refuse axes without places and names that come twice."""
        names = [axis.name for axis in self.axes]
        for axis in self.axes:
            if axis.size < 1:
                raise MeshError(f"mesh axis `{axis.name}` has size {axis.size}, at least 1 needed")
            if names.count(axis.name) > 1:
                raise MeshError(f"mesh axis `{axis.name}` comes twice")

    @property
    def names(self) -> tuple[str, ...]:
        """Return the axis names, outermost first."""
        return tuple(axis.name for axis in self.axes)

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return math.prod(axis.size for axis in self.axes)

    def members(self, axis: AxisName) -> tuple[str, ...]:
        """Return the mesh's own axes that `axis` stands for, outermost first."""
        wanted = {axis} if isinstance(axis, str) else set(axis)
        if "dp" in wanted and "dp" not in self.names:
            wanted |= set(DATA_PARALLEL)
        return tuple(name for name in self.names if name in wanted)

    def size(self, axis: AxisName) -> int:
        """Return the number of places along an axis; 1 when the mesh lacks it."""
        inside = self.members(axis)
        return math.prod(a.size for a in self.axes if a.name in inside)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return where a rank stands, one index per axis."""
        if not 0 <= rank < self.world_size:
            raise MeshError(f"rank {rank} is outside a mesh of {self.world_size} ranks")
        place: dict[str, int] = {}
        for axis in reversed(self.axes):
            rank, place[axis.name] = divmod(rank, axis.size)
        return {name: place[name] for name in self.names}

    def rank(self, **coords: int) -> int:
        """Return the rank at a place; axes not named are 0."""
        for name in coords.keys() - set(self.names):
            if coords[name] != 0:
                raise MeshError(f"the mesh has no axis `{name}`: it has {', '.join(self.names)}")
        rank = 0
        for axis in self.axes:
            index = coords.get(axis.name, 0)
            if not 0 <= index < axis.size:
                raise MeshError(f"{axis.name} = {index} is outside an axis of size {axis.size}")
            rank = rank * axis.size + index
        return rank

    def index(self, rank: int, axis: AxisName) -> int:
        """Return a rank's place within its group along an axis."""
        return self.group(rank, axis).index(rank)

    def group(self, rank: int, axis: AxisName) -> tuple[int, ...]:
        """Return, in order, the ranks that differ from `rank` only along an axis."""
        place = self.coordinate(rank)
        inside = self.members(axis)
        sizes = [range(self.size(name)) for name in inside]
        moves = (dict(zip(inside, index, strict=True)) for index in product(*sizes))
        return tuple(self.rank(**{**place, **move}) for move in moves)

    def groups(self, axis: AxisName) -> tuple[tuple[int, ...], ...]:
        """Return every group along an axis, by first rank; together they hold each rank once."""
        return _unique(self.group(rank, axis) for rank in range(self.world_size))

    def __str__(self) -> str:
        """Return the mesh as reports print it: `pp 2 x tp 2 = 4`."""
        axes = " x ".join(f"{axis.name} {axis.size}" for axis in self.axes)
        return f"{axes or 'one rank'} = {self.world_size}"


def _unique(groups: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    return tuple(dict.fromkeys(groups))
