"""Look at values that no input enters: causal masks, ALiBi slopes, position tables."""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from autoshard.ir.placement import Shard

LARGEST = 2**28  # elements


class Constants:
    """Constant values of one graph, computed on demand."""

    def __init__(self) -> None:
        self._known: dict[Node, torch.Tensor | None] = {}

    def is_uniform(self, node: Node, shard: Shard, samples: int) -> bool:
        """Tell whether a constant is the same for all ``samples`` that lie along the shard."""
        value = self._value(node)
        if not isinstance(value, torch.Tensor):
            return False
        blocks = max(len(shard.blocks), 1)
        extent = value.shape[shard.dim]
        if extent % (blocks * samples):
            return False
        wide = value.unflatten(shard.dim, (blocks, samples, extent // (blocks * samples)))
        first = wide.narrow(shard.dim + 1, 0, 1)
        return bool((wide == first).all())

    def _value(self, node: Node) -> object:
        """Return the value of a constant small enough to compute, None for any other node."""
        if node not in self._known:
            self._known[node] = self._compute(node)
        return self._known[node]

    def _compute(self, node: Node) -> object:
        fake = node.meta.get("val")
        small = not isinstance(fake, torch.Tensor) or fake.numel() <= LARGEST
        if node.op != "call_function" or not small:
            return None
        if any(self._value(source) is None for source in node.all_input_nodes):
            return None
        args, kwargs = map_arg((node.args, dict(node.kwargs)), self._value)
        return node.target(*args, **kwargs)
