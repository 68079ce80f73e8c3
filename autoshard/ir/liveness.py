"""Where each value is read for the last time: generated code deletes it right there."""

from __future__ import annotations

from torch.fx import Graph, Node


def last_uses(graph: Graph) -> dict[Node, tuple[Node, ...]]:
    """Return node -> the values that nobody reads after it, in the order they were made.

    A value that nobody reads at all dies where it is made. Values that the graph returns are
    never listed. Views of a value keep its storage alive: deleting a name frees memory only when
    it was the last one.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    dying: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        last = max(node.users, key=order.__getitem__, default=node)
        if last.op != "output":
            dying.setdefault(last, []).append(node)
    return {node: tuple(values) for node, values in dying.items()}
