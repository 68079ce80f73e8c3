"""Facts about values that no placement carries: constant along a dim."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import MappingProxyType

from torch.fx import Node

from autoshard.ir.constants import Constants
from autoshard.ir.placement import REPLICATE, Placement, Shard
from autoshard.ir.rules.call import call_of, shapes_of, tensor_inputs
from autoshard.ir.rules.table import choose


class Uniformity:
    """Tells along which dims a value is constant: all its slices there are equal.

    The rule table says which slices of an output are computed from which slices of the inputs; if
    those are equal, these are.
    """

    def __init__(self, samples: int, origins: Mapping[Node, Node] = MappingProxyType({})) -> None:
        """``origins`` tell which node of another graph made an input; it may grow later."""
        self.samples, self.origins = samples, origins
        self.constants = Constants(samples, origins)
        self.known: dict[Node, frozenset[int]] = {}

    def is_uniform(self, value: Node, shard: Shard) -> bool:
        """Tell whether all samples along a shard read the same; a single one always does.

        A constant that the table can't judge is computed and looked at.
        """
        if self.samples == 1 or shard.dim in self.dims(value):
            return True
        return self.constants.is_uniform(value, shard)

    def dims(self, value: Node) -> frozenset[int]:
        """Return the dims along which a value is constant."""
        value = self.origins.get(value, value)
        if value not in self.known:
            self.known[value] = self._find(value)
        return self.known[value]

    def _find(self, value: Node) -> frozenset[int]:
        shape = shapes_of(value)[0]
        found = {d for d, extent in enumerate(shape) if extent == 1}
        if value.op != "call_function" or value.target is operator.getitem:
            return frozenset(found)
        inputs = tensor_inputs(value)
        call = call_of(value, self.samples, axis="dp")
        found |= set(choose(call, (REPLICATE,) * len(inputs)).uniform)
        for place, given in enumerate(inputs):
            for dim in self.dims(given) if len(shapes_of(given)) == 1 else ():
                ins = tuple(Shard(dim) if i == place else REPLICATE for i in range(len(inputs)))
                choice = choose(call, ins)
                wanted = zip(inputs, choice.wants, strict=True)
                if choice.wants[place] == ins[place] and all(self._fits(n, w) for n, w in wanted):
                    found |= {p.dim for p in choice.outs[:1] if isinstance(p, Shard)}
        return frozenset(found)

    def _fits(self, value: Node, want: Placement) -> bool:
        return want == REPLICATE or (isinstance(want, Shard) and want.dim in self.dims(value))
