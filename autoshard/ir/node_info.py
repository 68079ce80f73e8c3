"""The one metadata record on a node, read by ``info(node)`` and written by the Rewriter only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from autoshard.ir.placement import REPLICATE, Placement
from autoshard.source import Span

KEY = "autoshard"


@dataclass(frozen=True)
class NodeInfo:
    """Where a node comes from and how its value lies over the mesh."""

    path: str = ""  # module path in the user's model, "" at its root
    source: str = ""  # user line: "model.py:42: x = self.fc(x)"
    phase: str = "F"  # "F" forward, "B" backward
    placements: Mapping[str, Placement] = field(default_factory=dict)  # absent axis: Replicate
    role: str = ""  # what is not the model's own: "cast", "recomputed"
    span: Span | None = None  # the plan line that caused the last change
    passes: tuple[str, ...] = ()  # passes that made or changed the node, in order

    def placement(self, axis: str) -> Placement:
        """Return the placement over ``axis``; Replicate where none is recorded."""
        return self.placements.get(axis, REPLICATE)

    def on(self, axis: str, placement: Placement) -> NodeInfo:
        """Return a copy that is placed so over ``axis``."""
        return replace(self, placements={**self.placements, axis: placement})


def info(node: Node) -> NodeInfo:
    """Return the node's record; an empty one when it has none."""
    return node.meta.get(KEY) or NodeInfo()


def origin(node: Node, path: str | None = None) -> str:
    """Return where a node comes from: module, user line, plan line, the passes that changed it.

    Passes come last one first: any of them may be wrong. ``path`` is another module that the node
    stands for.
    """
    record = info(node)
    places = [record.source or "no source"]
    places += [f"plan line {record.span.line}"] if record.span else []
    if record.passes:
        last, *earlier = dict.fromkeys(reversed(record.passes))
        before = f", before by {', '.join(earlier)}" if earlier else ""
        places.append(f"last changed by {last}{before}")
    return f"{(record.path if path is None else path) or 'model'} ({', '.join(places)})"


def may_have_gradient(value: object) -> bool:
    """Tell whether a value is a tensor of floats or complex numbers, or holds one."""
    if isinstance(value, (tuple, list)):
        return any(map(may_have_gradient, value))
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def set_info(node: Node, record: NodeInfo) -> None:
    """Write the node's record. For capture, lowering and the Rewriter."""
    node.meta[KEY] = record


def val(node: Node) -> torch.Tensor:
    """Return the node's fake tensor (shape, dtype, device); raises KeyError when it has none."""
    return node.meta["val"]
