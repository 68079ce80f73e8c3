"""A graph with named ports: what each placeholder is and what each output means."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.nn import Module

# Kinds of input ports ------------------------------------------------------------------------
PARAM = "param"  # name: fully qualified name; the local (tensor-parallel) shard, whole over dp
BUFFER = "buffer"  # name: fully qualified name of a buffer, or of a lifted constant
BATCH = "batch"  # name: leaf of the micro-batch ("input_ids", "0", "inputs.mask")
RNG = "rng"  # name "": int64[3] = (seed, step, global index of the micro-batch's first sample)
NORMALIZER = "normalizer"  # name "0", "1": 0-d tensor, 1 / (a count over the global batch)
FLAT = "flat"  # name: bucket; the rank's 1-D shard of a flat parameter bucket
SAVED = "saved"  # name: value kept from F for I or W, or from I for W
# Kinds used both ways ------------------------------------------------------------------------
BOUNDARY = "boundary"  # name: a value that crosses from one stage to the next
TANGENT = "tangent"  # gradient of the boundary value of that name, or of "loss"
# Kinds of output ports -----------------------------------------------------------------------
LOSS = "loss"  # name "": this micro-batch's and data-parallel rank's term of the global loss
OUTPUT = "output"  # name: leaf of the model's output (programs without a loss)
GRAD = "grad"  # name: fully qualified name; gradient of the local parameter, Partial over dp
FLAT_GRAD = "flat_grad"  # name: bucket; reduced gradient shard of a flat bucket
COUNT = "count"  # name: of a normalizer; the prelude's count over one micro-batch
# Kinds of the U and R graphs only ---------------------------------------------------------------
FULL = "full"  # output of U; name: bucket; the gathered bucket, 1-D
ACCUMULATED = "accumulated"  # input of R; name: bucket; its whole gradient, not yet reduced
FULL_GRAD = "full_grad"  # output of R; name: bucket that is stored whole; its reduced gradient


@dataclass(frozen=True)
class Port:
    """One input or output of a graph: a kind (above) and a name."""

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind


@dataclass
class GraphFunction:
    """A flat fx graph; ``inputs[i]`` is placeholder i, ``outputs[i]`` the output's i-th value.

    Outputs are a flat tuple of nodes; a node may be output under several ports; None stands for a
    value that does not exist (a boundary input that gets no gradient).
    """

    graph: Graph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @property
    def placeholders(self) -> tuple[Node, ...]:
        """Return the placeholder nodes, in port order."""
        return tuple(self.graph.find_nodes(op="placeholder"))

    @property
    def output_node(self) -> Node:
        """Return the graph's output node."""
        return next(iter(reversed(self.graph.nodes)))

    @property
    def results(self) -> tuple[Node | None, ...]:
        """Return the output values, in port order."""
        return tuple(self.output_node.args[0])

    @property
    def makes_gradients(self) -> bool:
        """Tell whether the graph has gradients of parameters among its outputs."""
        return any(port.kind == GRAD for port in self.outputs)

    def node(self, kind: str, name: str = "") -> Node | None:
        """Return the placeholder of an input port, or None."""
        return self._find(self.inputs, self.placeholders, kind, name)

    def result(self, kind: str, name: str = "") -> Node | None:
        """Return the value of an output port, or None."""
        return self._find(self.outputs, self.results, kind, name)

    def named(self, kind: str) -> dict[str, Node]:
        """Return name -> placeholder for all input ports of a kind."""
        pairs = zip(self.inputs, self.placeholders, strict=True)
        return {port.name: node for port, node in pairs if port.kind == kind}

    def named_results(self, kind: str) -> dict[str, Node | None]:
        """Return name -> value for all output ports of a kind."""
        pairs = zip(self.outputs, self.results, strict=True)
        return {port.name: node for port, node in pairs if port.kind == kind}

    def set_outputs(self, values: Iterable[Node | None], ports: Iterable[Port]) -> None:
        """Replace the graph's outputs."""
        self.output_node.args = (tuple(values),)
        self.outputs = tuple(ports)

    def clone(self) -> GraphFunction:
        """Return an independent copy; node metadata records are shared, they are immutable."""
        graph, copies = Graph(), dict[Node, Node]()
        for node in self.graph.nodes:
            copies[node] = copy_node(graph, node, copies.__getitem__)
        return GraphFunction(graph, self.inputs, self.outputs)

    def module(self) -> GraphModule:
        """Return the graph as a GraphModule, for printing, editing and running by users."""
        return GraphModule(Module(), self.graph)

    @staticmethod
    def _find(ports: tuple, nodes: tuple, kind: str, name: str) -> Node | None:
        port = Port(kind, name)
        return nodes[ports.index(port)] if port in ports else None


def copy_node(graph: Graph, node: Node, copied: Callable[[Node], Node]) -> Node:
    """Insert a copy of ``node``, which may be of another graph; ``copied`` gives what it reads.

    ``Graph.node_copy`` does the same, but it looks for symbolic numbers among the arguments, which
    takes most of its time; our graphs have none.
    """
    copy = graph.create_node(node.op, node.target, (), {}, node.name, node.type)
    copy.args = map_arg(node.args, copied)
    if node.kwargs:
        copy.kwargs = map_arg(node.kwargs, copied)
    copy.meta = dict(node.meta)
    return copy
