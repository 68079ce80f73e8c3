"""Copy some nodes of a graph into a graph of their own, with named ports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.fx import Graph, Node

from autoshard.ir.graph_function import GraphFunction, Port, copy_node
from autoshard.ir.rewrite import legal_name


def extract(
    inputs: Sequence[tuple[Port, Node]],
    body: Iterable[Node],
    outputs: Sequence[tuple[Port, Node | None]],
) -> GraphFunction:
    """Return a function that computes ``outputs`` from ``inputs`` by copies of ``body``.

    ``body`` is in order of execution; an input may stand for any node (its value then arrives
    from outside). Inputs that nothing reads are left out.
    """
    body = tuple(body)
    read = {arg for node in body for arg in node.all_input_nodes}
    read |= {node for _, node in outputs if node is not None}
    graph, copies = Graph(), {}
    kept = [(port, node) for port, node in inputs if node in read]
    for port, node in kept:
        copies[node] = graph.placeholder(legal_name(port))
        copies[node].meta = dict(node.meta)
    for node in body:
        copies[node] = copy_node(graph, node, copies.__getitem__)
    graph.output(tuple(None if node is None else copies[node] for _, node in outputs))
    return GraphFunction(graph, tuple(p for p, _ in kept), tuple(p for p, _ in outputs))


def ancestors(targets: Iterable[Node], stop: set[Node] | frozenset[Node]) -> set[Node]:
    """Return ``targets`` and all they are computed from, not going through nodes of ``stop``.

    Nodes of ``stop`` themselves are left out.
    """
    found: set[Node] = set()
    pending = [node for node in targets if node not in stop]
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        pending.extend(arg for arg in node.all_input_nodes if arg not in stop)
    return found
