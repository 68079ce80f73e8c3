"""Lower a forward graph to an explicit joint graph: forward and backward in ATen operations.

The forward graph is run by an interpreter on fake tensors under ``make_fx``, then
``torch.autograd.grad`` runs under the same trace. While either runs, every node that appears in the
new graph is stamped with the record of the user's module it stands for: the interpreter knows the
forward node it executes, and a pre-hook on each autograd node tells whose backward comes next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch
from torch.fx import Graph, Interpreter, Node

from autoshard.compat import FakeTensor, FakeTensorMode, graph_under_trace, make_fx
from autoshard.diagnostics import InternalError
from autoshard.ir.extract import extract
from autoshard.ir.graph_function import GraphFunction, Port
from autoshard.ir.node_info import KEY, NodeInfo, info, set_info
from autoshard.ir.tidy import tidy


@dataclass(frozen=True)
class Differentiation:
    """Say what to differentiate: seeds of outputs, and the gradient port of each input."""

    seeds: Mapping[Port, Port] = field(default_factory=dict)  # output -> its gradient, an input
    gradients: Mapping[Port, Port] = field(default_factory=dict)  # input -> its gradient


def lower(function: GraphFunction, task: Differentiation = Differentiation()) -> GraphFunction:
    """Return ``function`` in ATen operations as autograd runs them, with ``task``'s gradients.

    Inputs are those of ``function`` that are read, then the seeds of differentiable outputs;
    outputs those of ``function``, then the gradients that exist, in the order of ``task``. The
    given function is not changed.
    """
    trace = _Trace(function, task)
    ports = (*function.inputs, *trace.seeds)
    graph = make_fx(trace)(*trace.fake_inputs()).graph
    return tidy(_collect(graph, function, ports, task))


def _collect(
    graph: Graph, function: GraphFunction, ports: tuple[Port, ...], task: Differentiation
) -> GraphFunction:
    """Return the traced graph with named inputs and outputs and clean metadata."""
    old = dict(zip(function.inputs, function.placeholders, strict=True))
    inputs = list(zip(ports, graph.find_nodes(op="placeholder"), strict=True))
    for port, node in inputs:
        set_info(node, info(old[port]) if port in old else NodeInfo(phase="B"))
    for node in graph.nodes:
        if node.op == "get_attr":
            raise InternalError(f"lowering left a constant {node.target} in the graph")
        node.meta = {key: node.meta[key] for key in ("val", KEY) if key in node.meta}
    results = graph.output_node().args[0]
    count = len(function.outputs)
    outputs = list(zip(function.outputs, results[:count], strict=True))
    grads = zip(task.gradients.values(), results[count:], strict=True)
    outputs += [(port, node) for port, node in grads if node is not None]
    return extract(inputs, (n for n in graph.nodes if n.op == "call_function"), outputs)


class _Trace:
    """The function that ``make_fx`` traces: forward, then the gradients."""

    def __init__(self, function: GraphFunction, task: Differentiation) -> None:
        self._function = function
        self._task = task
        self.seeds = tuple(task.seeds[port] for port in function.outputs if port in task.seeds)

    def fake_inputs(self) -> tuple[torch.Tensor, ...]:
        """Return fresh leaves for every input and seed."""
        function = self._function
        values = [node.meta["val"] for node in function.placeholders]
        pairs = zip(function.inputs, values, strict=True)
        leaves = [_leaf(value, port in self._task.gradients) for port, value in pairs]
        results = dict(zip(function.outputs, function.results, strict=True))
        seeded = (results[port] for port in function.outputs if port in self._task.seeds)
        return (*leaves, *(_leaf(node.meta["val"], False) for node in seeded))

    def __call__(self, *args: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        count = len(self._function.inputs)
        stamper = _Stamper(graph_under_trace())
        with self._mode():
            outputs = _Tagged(self._function.graph, stamper).run(*args[:count])
            gradients = self._gradients(args[:count], outputs, args[count:])
        stamper.flush()
        return (*outputs, *gradients)

    def _mode(self) -> FakeTensorMode:
        """Return the mode of the function's values; a function of constants has no argument."""
        values = (node.meta.get("val") for node in self._function.graph.nodes)
        return next(value.fake_mode for value in values if isinstance(value, FakeTensor))

    def _gradients(
        self,
        inputs: tuple[torch.Tensor, ...],
        outputs: tuple[torch.Tensor, ...],
        seeds: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        by_port = dict(zip(self._function.inputs, inputs, strict=True))
        wanted = [by_port[port] for port in self._task.gradients]
        pairs = zip(self._function.outputs, outputs, strict=True)
        seeded = [value for port, value in pairs if port in self._task.seeds]
        pulled = [(v, s) for v, s in zip(seeded, seeds, strict=True) if v.requires_grad]
        if not wanted or not pulled:
            return (None,) * len(wanted)
        values, tangents = zip(*pulled, strict=True)
        return torch.autograd.grad(values, wanted, tangents, allow_unused=True)


class _Stamper:
    """Gives new nodes of the graph under trace the record that is current."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._current = NodeInfo()
        self._hooked: set[torch.autograd.graph.Node] = set()

    def switch(self, record: NodeInfo) -> None:
        """Stamp what was traced since the last switch, then make ``record`` current."""
        self.flush()
        self._current = record

    def flush(self) -> tuple[Node, ...]:
        """Stamp what was traced since the last switch and return it, last node first."""
        fresh = tuple(takewhile(lambda n: KEY not in n.meta, reversed(self._graph.nodes)))
        for node in fresh:
            set_info(node, self._current)
        return fresh

    def mark_result(self, value: object, record: NodeInfo) -> None:
        """Let the node that holds ``value`` keep the placements of the forward node it stands for.

        Nodes in between (the transpose inside a linear) have other shapes: none is recorded.
        """
        fresh = self.flush()
        if fresh and isinstance(value, torch.Tensor):
            set_info(fresh[0], replace(info(fresh[0]), placements=record.placements))

    def hook_backward(self, value: object, record: NodeInfo) -> None:
        """Let the backward of everything that led to ``value`` switch to ``record`` first."""
        pending = [t.grad_fn for t in _tensors(value)]
        while pending:
            grad_fn = pending.pop()
            if grad_fn is None or grad_fn in self._hooked:
                continue
            self._hooked.add(grad_fn)
            grad_fn.register_prehook(lambda _grads: self.switch(record))
            pending.extend(parent for parent, _ in grad_fn.next_functions)


class _Tagged(Interpreter):
    """Runs the forward graph and tells the stamper which node is being run."""

    def __init__(self, graph: Graph, stamper: _Stamper) -> None:
        super().__init__(torch.nn.Module(), graph=graph)
        self._stamper = stamper

    def run_node(self, n: Node) -> object:
        """Run one node with its record current; prepare the records of its backward."""
        if n.op != "call_function":
            return super().run_node(n)
        record = replace(info(n), placements={})
        self._stamper.switch(record)
        value = super().run_node(n)
        self._stamper.mark_result(value, info(n))
        self._stamper.hook_backward(value, replace(record, phase="B"))
        return value


def _leaf(value: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    with value.fake_mode:
        leaf = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    return leaf.requires_grad_(requires_grad)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Collection):
        for item in value:
            yield from _tensors(item)
