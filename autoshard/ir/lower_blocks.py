"""Lower a deep graph block by block, equal blocks once.

Autograd runs backward in the reverse order of forward. So where a chain of blocks hands each value
that has a gradient to one block only, the joint graph of the chain is the forwards of its blocks in
order, then their backwards in reverse order: each can be made on its own, and equal ones stamped.
Gradients of an input (a parameter, a boundary value) that several blocks read are added as autograd
would.

    x1 = block0(x0); x2 = block1(x1)  -->  x1 = block0(x0); x2 = block1(x1)
                                           dx1, dw1 = block1'(dx2); dx0, dw0 = block0'(dx1)

Where that doesn't hold, the graph is lowered in one go: the result is the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from autoshard.ir.extract import extract
from autoshard.ir.graph_function import (
    BOUNDARY,
    GRAD,
    PARAM,
    TANGENT,
    GraphFunction,
    Port,
    copy_node,
)
from autoshard.ir.lower import Differentiation, lower
from autoshard.ir.node_info import info, may_have_gradient, set_info
from autoshard.ir.rewrite import legal_name
from autoshard.ir.stamp import Outline, outline, stamp
from autoshard.ir.tidy import tidy

Done = dict[Hashable, tuple[Outline, GraphFunction]]  # pattern -> what was lowered, and from what
_GRADIENTS = (GRAD, TANGENT)  # of an input that several pieces read: one term from each
_FEW = 2  # pieces are not worth the trouble
aten = torch.ops.aten


def lower_once(function: GraphFunction, task: Differentiation, done: Done) -> GraphFunction:
    """Return ``lower(function, task)``; what equals something lowered before is stamped out.

    ``done`` holds what was lowered so far.
    """
    wanted = [port in task.seeds for port in function.outputs]
    pulled = [port in task.gradients for port in function.inputs]
    ports = (*task.seeds.values(), *task.gradients.values())
    own = outline(function, (tuple(wanted), tuple(pulled)), ports)
    if own.pattern not in done:
        done[own.pattern] = own, _by_blocks(function, task, done) or lower(function, task)
    return stamp(done[own.pattern][1], done[own.pattern][0], own)


def gradient_reaches(function: GraphFunction, inputs: Iterable[Port]) -> set[Node]:
    """Return the values that depend on ``inputs`` through operations that have a gradient.

    Autograd may still find that a value needs none.
    """
    roots = set(inputs)
    pairs = zip(function.inputs, function.placeholders, strict=True)
    found = {node for port, node in pairs if port in roots}
    for node in function.graph.nodes:
        reaches = node.op == "call_function" and not found.isdisjoint(node.all_input_nodes)
        is_detached = node.target is aten.detach.default
        if reaches and not is_detached and may_have_gradient(node.meta["val"]):
            found.add(node)
    return found


@dataclass
class _Piece:
    """A run of operations of one block, as a function of its own."""

    function: GraphFunction
    joint: GraphFunction | None = None


def _by_blocks(function: GraphFunction, task: Differentiation, done: Done) -> GraphFunction | None:
    """Return the joint graph made of its pieces', or None where that would be another one."""
    cut = _Cut(function, task)
    if len(cut.bodies) <= _FEW or not cut.is_chain():
        return None
    pieces = [_Piece(piece) for piece in cut.pieces()]
    sent: dict[str, Node] = {}  # crossing value -> its gradient, made by the piece that reads it
    for piece in reversed(pieces):
        own = cut.task(piece.function, sent)
        piece.joint = lower_once(piece.function, own, done)
        if not set(piece.joint.inputs).issuperset(own.seeds.values()):
            return None  # autograd found that a value has no gradient after all
        sent |= piece.joint.named_results(TANGENT)
        values = {**piece.function.named(BOUNDARY), **piece.function.named(PARAM)}
        given = {**piece.joint.named_results(TANGENT), **piece.joint.named_results(GRAD)}
        if any(not _alike(values[name], node) for name, node in given.items()):
            return None  # what follows would be made for another layout
    return tidy(_join(function, task, [piece.joint for piece in pieces]))


def _alike(value: Node, gradient: Node) -> bool:
    return value.meta["val"].stride() == gradient.meta["val"].stride()


class _Cut:
    """A graph cut where numbered modules begin."""

    def __init__(self, function: GraphFunction, task: Differentiation) -> None:
        self._function, self._task = function, task
        self.bodies = _runs([n for n in function.graph.nodes if n.op == "call_function"])
        self._place = {node: i for i, body in enumerate(self.bodies) for node in body}
        self._pulled = gradient_reaches(function, task.gradients)
        self._readers: dict[Node, list[int]] = {}  # of each value: the other pieces that read it
        for index, body in enumerate(self.bodies):
            for arg in dict.fromkeys(a for node in body for a in node.all_input_nodes):
                if self._place.get(arg) != index:
                    self._readers.setdefault(arg, []).append(index)

    def is_chain(self) -> bool:
        """Tell whether each value with a gradient is given to one piece, and only tensors are."""
        results = [node for node in self._function.results if node is not None]
        given = [node for node in self._readers if node.op == "call_function"]
        return (
            all(node.op == "call_function" for node in results)
            and len(set(results)) == len(results)
            and all(isinstance(node.meta["val"], torch.Tensor) for node in given)
            and not any(node in self._pulled for node in given if node in set(results))
            and all(len(self._readers[node]) == 1 for node in given if node in self._pulled)
        )

    def pieces(self) -> Iterator[GraphFunction]:
        """Yield each piece; what it reads of the others are boundary values."""
        function = self._function
        given = list(zip(function.inputs, function.placeholders, strict=True))
        given += [(_port(n), n) for n in self._place if n in self._readers]
        ends = list(zip(function.outputs, function.results, strict=True))
        for body in self.bodies:
            own = set(body)
            inputs = [(port, node) for port, node in given if node not in own]
            outputs = [(port, node) for port, node in ends if node in own]
            outputs += [(_port(n), n) for n in body if n in self._readers]
            yield extract(inputs, body, outputs)

    def task(self, piece: GraphFunction, sent: dict[str, Node]) -> Differentiation:
        """Say what to differentiate in a piece, given the gradients that later pieces send."""
        seeds, gradients = {}, {}
        for port in piece.outputs:
            if port in self._task.seeds:
                seeds[port] = self._task.seeds[port]
            elif port.kind == BOUNDARY and port.name in sent:
                seeds[port] = Port(TANGENT, port.name)
        pulled = {_port(node) for node in self._pulled if node in self._readers}
        for port in piece.inputs:
            if port in self._task.gradients:
                gradients[port] = self._task.gradients[port]
            elif port in pulled:
                gradients[port] = Port(TANGENT, port.name)
        return Differentiation(seeds, gradients)


def _runs(calls: list[Node]) -> list[list[Node]]:
    """Return ``calls`` cut before the first one of each numbered module, and where none follows.

    What an earlier module still has to do then stays with its successor, as a norm that is fused
    over their border. The items of a tuple stay with the tuple.
    """
    runs: list[list[Node]] = []
    order = {node: index for index, node in enumerate(calls)}
    seen: set[str] = set()
    before, picked = None, 0
    for index, node in enumerate(calls):
        block = _block(node)
        is_new = block != before and (block not in seen or not block)
        if not runs or (is_new and index > picked):
            runs.append([])
        runs[-1].append(node)
        seen.add(block)
        before = block
        if not isinstance(node.meta["val"], torch.Tensor):
            picked = max((order[user] for user in node.users if user in order), default=picked)
    return runs


def _block(node: Node) -> str:
    """Return the outermost numbered module that an operation belongs to, "" for none."""
    parts = info(node).path.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdecimal()), -1)
    return ".".join(parts[: numbered + 1])


def _port(node: Node) -> Port:
    return Port(BOUNDARY, f"piece:{node.name}")


def _join(
    function: GraphFunction, task: Differentiation, joints: list[GraphFunction]
) -> GraphFunction:
    """Return the forwards in order, then the backwards in reverse order, as one graph."""
    read = {port: node for j in joints for port, node in zip(j.inputs, j.placeholders, strict=True)}
    seeds = [task.seeds[port] for port in function.outputs if port in task.seeds]
    graph, values = Graph(), {}
    inputs = tuple(port for port in (*function.inputs, *seeds) if port in read)
    for port in inputs:
        values[port] = graph.placeholder(legal_name(port))
        values[port].meta = dict(read[port].meta)
    halves = [_halves(joint) for joint in joints]
    copies: dict[Node, Node] = {}
    for joint, (forward, _) in zip(joints, halves, strict=True):
        _copy(joint, forward, graph, copies, values)
    for joint, (_, backward) in reversed(list(zip(joints, halves, strict=True))):
        _copy(joint, backward, graph, copies, values)
    made = {port for joint in joints for port in joint.outputs}
    gradients = [port for port in task.gradients.values() if port in made]
    outputs = (*function.outputs, *gradients)
    graph.output(tuple(values[port] for port in outputs))
    return GraphFunction(graph, inputs, outputs)


def _halves(joint: GraphFunction) -> tuple[list[Node], list[Node]]:
    """Return the operations of forward and those of backward, which come after all of forward."""
    calls = [node for node in joint.graph.nodes if node.op == "call_function"]
    first = next((i for i, n in enumerate(calls) if info(n).phase == "B"), len(calls))
    return calls[:first], calls[first:]


def _copy(
    joint: GraphFunction,
    calls: list[Node],
    graph: Graph,
    copies: dict[Node, Node],
    values: dict[Port, Node],
) -> None:
    """Append ``calls``, reading other pieces' values by port, and note what they give."""
    for port, node in zip(joint.inputs, joint.placeholders, strict=True):
        if port in values:
            copies[node] = values[port]
    for node in calls:
        copies[node] = copy_node(graph, node, copies.__getitem__)
    own = set(calls)
    for port, node in zip(joint.outputs, joint.results, strict=True):
        if port in values and port.kind in _GRADIENTS and node in own:
            values[port] = _add(graph, values[port], copies[node])
        elif node in own or (node in copies and port not in values):
            values[port] = copies[node]


def _add(graph: Graph, later: Node, earlier: Node) -> Node:
    """Add the gradients of an input that two pieces share, where autograd adds them."""
    with graph.inserting_after(earlier):
        total = graph.call_function(aten.add.Tensor, (later, earlier))
    total.meta["val"] = later.meta["val"]
    set_info(total, info(earlier))
    return total
