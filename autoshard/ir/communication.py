"""Which collectives a node performs: what printing, counting and proving read."""

from __future__ import annotations

from torch.fx import Node
from torch.fx.node import map_arg

from autoshard.ops.library import Traffic, spec


def node_traffic(node: Node) -> tuple[Traffic, ...]:
    """Return the collectives that a node performs, in order; none for any op that is not ours."""
    op = spec(node.target)
    if op is None:
        return ()
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return tuple(op.traffic(*args, **kwargs))
