"""Compile what stands between collectives with torch's Inductor (`fuse { compile = inductor }`).

A phase keeps its collectives, its own operators and its order. Each run of torch's operators in
between becomes one call of a function that Inductor makes when the program is linked, before
anything is sent; equal runs share one. What Inductor can't compile stays as it is.

    t = t(w); u = mm(x, t); y = gelu(u); all_reduce(y)  -->  y = compiled(w, x)[0]; all_reduce(y)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator
from itertools import groupby

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from autoshard.compat import FakeTensorMode, inductor_compile
from autoshard.ir.aliases import is_cheap
from autoshard.ir.extract import extract
from autoshard.ir.graph_function import BOUNDARY, GraphFunction, Port
from autoshard.ir.program import Program
from autoshard.ir.stamp import outline

Call = Callable[..., list]


class Inductor:
    """Compiles runs of operators for one device; each distinct one once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done: dict[Hashable, Call | None] = {}  # pattern -> its function, None: it failed
        self.errors: list[str] = []  # of the runs that failed, the first line of each

    def compiled(self, function: GraphFunction) -> GraphFunction:
        """Return a copy of a phase with its runs compiled; the given one is not changed."""
        copy = function.clone()
        for run in list(_runs(copy.graph)):
            piece = _piece(run)
            pattern = outline(piece).pattern
            if pattern not in self._done:
                self._done[pattern] = self._compile(piece)
            call = self._done[pattern]
            if call is not None:
                _replace(copy.graph, run, call)
        return copy

    def summary(self) -> str:
        """Return what was compiled, for the report."""
        failed = sum(call is None for call in self._done.values())
        said = f"inductor   {len(self._done) - failed} distinct runs of operators compiled"
        return f"{said}, {failed} left plain: {self.errors[0]}" if failed else said

    def _compile(self, piece: GraphFunction) -> Call | None:
        graph = piece.graph
        with FakeTensorMode():
            examples = [self._example(node.meta["val"]) for node in piece.placeholders]
        for node in graph.nodes:
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), self._moved)
        try:
            with torch.no_grad():
                return inductor_compile(GraphModule(torch.nn.Module(), graph), examples)
        except Exception as error:  # whatever it is: the plain operators compute the same
            self.errors.append(str(error).partition("\n")[0])
            return None

    def _example(self, value: torch.Tensor) -> torch.Tensor:
        shape = value.shape, value.stride()
        return torch.empty_strided(*shape, dtype=value.dtype, device=self._device)

    def _moved(self, value: object) -> object:
        """Graphs are captured on the CPU, whatever the rank computes on."""
        return self._device if isinstance(value, torch.device) else value


def inductor_for(program: Program, device: torch.device) -> Inductor | None:
    """Return the compiler that the plan asks for, None where it asks for none."""
    return Inductor(device) if program.compiler == "inductor" else None


def _runs(graph: Graph) -> Iterator[list[Node]]:
    """Yield the longest runs that hold two operations or more; views alone cost nothing."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    for is_plain, nodes in groupby(calls, _is_plain):
        run = list(nodes)
        if is_plain and sum(not is_cheap(node) for node in run) > 1:
            yield run


def _is_plain(node: Node) -> bool:
    """Tell whether a call is torch's own, or picks an item of one."""
    if node.target is operator.getitem:
        return _is_plain(node.args[0])
    is_ours = not isinstance(node.target, OpOverload) or node.target.namespace != "aten"
    return not is_ours and torch.Tag.nondeterministic_seeded not in node.target.tags


def _piece(run: list[Node]) -> GraphFunction:
    """Return a run as a graph of its own."""
    own = set(run)
    read = dict.fromkeys(arg for node in run for arg in node.all_input_nodes if arg not in own)
    return extract([(_port(n), n) for n in read], run, [(_port(n), n) for n in _given(run)])


def _given(run: list[Node]) -> list[Node]:
    """Return the values of a run that others read."""
    own = set(run)
    return [node for node in run if any(user not in own for user in node.users)]


def _port(node: Node) -> Port:
    return Port(BOUNDARY, node.name)


def _replace(graph: Graph, run: list[Node], call: Call) -> None:
    own = set(run)
    read = dict.fromkeys(arg for node in run for arg in node.all_input_nodes if arg not in own)
    given = _given(run)
    with graph.inserting_before(run[-1].next):
        made = graph.call_function(call, tuple(read))
        made.meta["val"] = [node.meta["val"] for node in given]
        for index, node in enumerate(given):
            item = graph.call_function(operator.getitem, (made, index))
            item.meta = dict(node.meta)
            node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in own)
    for node in reversed(run):
        graph.erase_node(node)
