"""Check what operators are told of the mesh beside the placements of what they read."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from autoshard.ir.graph_function import FLAT_GRAD, GRAD, GraphFunction
from autoshard.ir.infer import is_zero
from autoshard.ir.node_info import origin
from autoshard.ir.program import Program
from autoshard.ir.rules.call import bound_arguments
from autoshard.ops import collectives
from autoshard.ops.library import NAMESPACE


def check_sizes(program: Program) -> Iterator[str]:
    """Say which calls count other ranks along an axis than the mesh has."""
    for name, function in program.functions():
        for node in function.graph.nodes:
            for axis, size in _told(node):
                have = program.mesh.size(axis)
                if size != have:
                    text = f"is told of {size} ranks along {axis}, the mesh has {have}"
                    yield f"{name}: {node.target} in {origin(node)}: {text}"


def _told(node: Node) -> Iterator[tuple[str, int]]:
    """Yield each axis that a call of ours names, with the number of ranks it counts there."""
    if getattr(node.target, "namespace", "") != NAMESPACE:
        return
    given = bound_arguments(node)
    if "axes" in given:
        yield from zip(given["axes"], given["sizes"], strict=True)
    elif "axis" in given and "size" in given:
        yield given["axis"], given["size"]


def check_shared(program: Program) -> Iterator[str]:
    """Say where gradients of heads that several ranks keep are not summed once over those ranks.

    Of no other value the same lies on neighbouring ranks, so nothing else may be summed so.
    """
    for name, function in program.functions():
        due: set[Node] = set()
        for fqn, grad in gradients(program, function):
            copies = program.params[fqn].copies
            if copies is None or is_zero(grad):
                continue
            sums = _sums_within(grad)
            due |= set(sums)
            wanted = (copies.times, "tp", copies.own_rows)
            if [(*node.args[1:], 0)[:3] for node in sums] != [wanted]:
                text = f"is not summed once over the {copies.times} ranks that keep the same head"
                yield f"{name}: {GRAD} '{fqn}' in {origin(grad)}: {text}"
        for node in function.graph.nodes:
            if node.target is collectives.all_reduce_within and node not in due:
                yield f"{name}: {node.target} in {origin(node)}: sums what is no copy of a head"


def gradients(program: Program, function: GraphFunction) -> Iterator[tuple[str, Node]]:
    """Yield each parameter whose gradient a graph makes, with that: alone or in a bucket."""
    fqns = {bucket.name: bucket.fqns for bucket in program.buckets}
    for port, node in zip(function.outputs, function.results, strict=True):
        if node is not None and port.kind == GRAD:
            yield port.name, node
        elif node is not None and port.kind == FLAT_GRAD:
            packed = packed_of(node)
            if packed is not None:
                yield from zip(fqns[port.name], packed.all_input_nodes, strict=False)


def packed_of(node: Node) -> Node | None:
    """Return the packing of gradients that a bucket's gradient was made from in one graph."""
    while node.target is not collectives.pack:
        if not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]
    return node


def _sums_within(grad: Node) -> list[Node]:
    """Return the sums over neighbouring ranks on the way to a gradient, the last one first."""
    found = []
    while True:
        if grad.target is collectives.all_reduce_within:
            found.append(grad)
        if len(grad.all_input_nodes) != 1:
            return found
        (grad,) = grad.all_input_nodes
