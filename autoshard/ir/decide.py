"""Decide how one call of a graph runs along one axis, once for all calls that ask the same.

The layers of a deep model ask the same hundreds of times; rules are functions of what they are
asked, so the axis keeps what was answered, for all graphs that are walked along it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch.fx import Node

from autoshard.ir.node_info import info
from autoshard.ir.placement import PARTIAL, REPLICATE, Placement, Shard
from autoshard.ir.rules.call import Call, Choice, Shape, TensorRef, call_of, shapes_of
from autoshard.ir.rules.table import choose
from autoshard.mesh import is_data_parallel

Value = Placement | None  # None: not known, something before it has no rule


@dataclass(frozen=True)
class Decided:
    """A rule's choice, and all placements of the output that are as true where they are several."""

    choice: Choice
    readings: tuple[Placement, ...] = ()


@dataclass(frozen=True)
class Axis:
    """The mesh axis that is looked at, and by what a shard's dimension is longer globally."""

    name: str
    size: int  # what a split dimension must be divisible by
    scale: int  # 1 where the graph's shapes are global
    known: dict[Hashable, Decided] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_data(self) -> bool:
        """Tell whether ranks along the axis read different samples."""
        return is_data_parallel(self.name)

    @property
    def recorded(self) -> str:
        """Return the name under which nodes record their placements along the axis."""
        return "dp" if self.is_data else self.name

    def whole(self, shape: Shape, placement: Value) -> Shape:
        """Return the global shape of a value of local ``shape`` that lies so."""
        if not isinstance(placement, Shard) or placement.dim >= len(shape):
            return shape
        scaled = list(shape)
        scaled[placement.dim] *= self.scale
        return tuple(scaled)


@dataclass(frozen=True)
class Question:
    """A call whose tensor inputs lie as ``ins``: how do its outputs lie?

    ``shapes`` returns the global shapes of an input's tensors. The graph holds local shapes; which
    dimension of an output is longer globally follows from the choice itself, so each is tried. A
    call can have several readings of the same local data: the simplest one is taken.
    """

    axis: Axis
    node: Node
    ins: tuple[Placement, ...]
    shapes: Callable[[Node], tuple[Shape, ...]]

    @property
    def decided(self) -> Decided:
        """Return the answer, found once for all equal questions about the axis."""
        key = self._key()
        if key not in self.axis.known:
            self.axis.known[key] = self._decide()
        return self.axis.known[key]

    def _key(self) -> Hashable:
        """Return all that an answer follows from: what rules see, and what the node records."""
        call = self._call(self._local)
        # 1, 1.0 and True are equal as keys, but not as arguments.
        arguments = repr(call.arguments)
        seen = (call.op, arguments, call.shapes, call.outs, call.iotas, call.zeros)
        return *seen, self.ins, self._recorded

    def _decide(self) -> Decided:
        if self.axis.scale == 1 or not any(isinstance(p, Shard) for p in self.ins):
            return Decided(self._choose(self._local))
        dims = range(max((len(shape) for shape in self._local), default=0))
        tried = [self._settle(guess) for guess in (REPLICATE, *map(Shard, dims))]
        fitting = [c for c, is_settled in tried if is_settled and c.wants == self.ins]
        if not fitting:
            return Decided(tried[0][0])
        is_unsure = len(self._local) == 1 and len(fitting) > 1
        readings = tuple(dict.fromkeys(c.outs[0] for c in fitting)) if is_unsure else ()
        return Decided(min(fitting, key=self._simplicity), readings)

    def _settle(self, guess: Placement) -> tuple[Choice, bool]:
        """Return the choice when outputs lie as guessed, or as chosen then; and if that holds."""
        outs = tuple(self.axis.whole(shape, guess) for shape in self._local)
        choice = self._choose(outs)
        agreed = tuple(map(self.axis.whole, self._local, choice.outs))
        if agreed == outs:
            return choice, True
        again = self._choose(agreed)
        return again, tuple(map(self.axis.whole, self._local, again.outs)) == agreed

    def _choose(self, outs: tuple[Shape, ...]) -> Choice:
        return choose(self._call(outs), self.ins)

    def _call(self, outs: tuple[Shape, ...]) -> Call:
        """Return the call as rules see it when its outputs are ``outs``."""

        def shapes(other: Node) -> tuple[Shape, ...]:
            return outs if other is self.node else self.shapes(other)

        return self._counting(call_of(self.node, self.axis.size, shapes, axis=self.axis.name))

    def _counting(self, call: Call) -> Call:
        """Let an index that counts the samples of a rank count all of them, as x has them here.

        ``mask[arange(B)[:, None], t]``: the arange is made from a literal, so it stays local.
        """
        held = self.ins[0] if self.ins else None
        if self.axis.scale == 1 or not call.iotas or not isinstance(held, Shard):
            return call
        counted = dict(enumerate(call["indices"])).get(held.dim)
        if not isinstance(counted, TensorRef) or counted.index not in call.iotas:
            return call
        before = call.shapes[counted.index]
        samples = call.shapes[0][held.dim] // self.axis.scale
        if samples not in before:
            return call
        after = self.axis.whole(before, Shard(before.index(samples)))
        shapes = (*call.shapes[: counted.index], after, *call.shapes[counted.index + 1 :])
        return replace(call, shapes=shapes)

    def _simplicity(self, choice: Choice) -> tuple[int, int, bool, bool]:
        """Return an order of readings: fewest blocks and sums, as recorded, tokens as tokens.

        A micro-batch of one sample makes outputs of extent 1, which also read as a sum over the
        ranks; and its tokens, when they come apart from it, as one sample of each rank.
        """
        shards = [p for p in choice.outs if isinstance(p, Shard)]
        blocks, sums = sum(len(p.blocks) for p in shards), choice.outs.count(PARTIAL)
        is_new = self._recorded is not None and self._recorded != choice.outs[0]
        return blocks, sums, is_new, self._is_one_sample(choice)

    def _is_one_sample(self, choice: Choice) -> bool:
        """Tell whether a longer split dim is read as one sample of each rank of a tensor axis."""
        first = choice.outs[0] == Shard(0) and self._local[0][:1] == (1,)
        return not self.axis.is_data and first

    @cached_property
    def _local(self) -> tuple[Shape, ...]:
        return shapes_of(self.node)

    @property
    def _recorded(self) -> Placement | None:
        """Return the placement that the node records; None where lowering added it."""
        return info(self.node).placements.get(self.axis.recorded)
