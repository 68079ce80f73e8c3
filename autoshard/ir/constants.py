"""Look at values that no input enters: causal masks, ALiBi slopes, position tables."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from autoshard.ir.node_info import val
from autoshard.ir.placement import Shard
from autoshard.ops import collectives
from autoshard.ops.library import spec

aten = torch.ops.aten

LARGEST = 2**28  # elements


class Constants:
    """Constant values of one graph, computed on demand."""

    def __init__(self, samples: int, origins: Mapping[Node, Node]) -> None:
        self.samples = samples  # of one micro-batch
        self.origins = origins  # an input -> the node of another graph that made it
        self._known: dict[Node, object] = {}

    def is_uniform(self, node: Node, shard: Shard) -> bool:
        """Tell whether a value is the same for all samples that lie along the shard."""
        node = self.origins.get(node, node)
        if node.target is aten.expand.default:
            source = val(node.args[0])
            dim = shard.dim - (val(node).dim() - source.dim())
            if dim < 0 or source.shape[dim] == 1:
                return True
        if node.target is collectives.shard:
            return self.is_uniform(node.args[0], shard)
        return self._is_constant_along(self._value(node), shard)

    def _is_constant_along(self, value: object, shard: Shard) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        blocks = max(len(shard.blocks), 1)
        extent = value.shape[shard.dim]
        if extent % (blocks * self.samples):
            return False
        per_sample = extent // (blocks * self.samples)
        wide = value.unflatten(shard.dim, (blocks, self.samples, per_sample))
        first = wide.narrow(shard.dim + 1, 0, 1)
        return bool((wide == first).all())

    def _value(self, node: Node) -> object:
        """Return the value of a constant small enough to compute, None for any other node."""
        node = self.origins.get(node, node)
        if node not in self._known:
            self._known[node] = self._compute(node)
        return self._known[node]

    def _compute(self, node: Node) -> object:
        fake = node.meta.get("val")
        small = not isinstance(fake, torch.Tensor) or fake.numel() <= LARGEST
        if node.op != "call_function" or not small or spec(node.target) is not None:
            return None
        if any(self._value(source) is None for source in node.all_input_nodes):
            return None
        args, kwargs = map_arg((node.args, dict(node.kwargs)), self._value)
        return node.target(*args, **kwargs)
