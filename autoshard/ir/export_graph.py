"""From torch's exported program to our GraphFunction: named ports, ties made one, no noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoshard.compat import ExportedProgram, FakeTensorMode, fake_like
from autoshard.diagnostics import CaptureError
from autoshard.ir.export_spelling import ERASED, respell
from autoshard.ir.fakes import FakeMode, refake
from autoshard.ir.graph_function import (
    BATCH,
    BUFFER,
    LOSS,
    OUTPUT,
    PARAM,
    GraphFunction,
    Port,
)
from autoshard.ir.node_info import NodeInfo, may_have_gradient, set_info
from autoshard.ir.params import ParamTable
from autoshard.ir.rewrite import legal_name
from autoshard.ir.user_line import user_line

MODEL = "model"  # the model's name inside the wrapper that is exported
aten = torch.ops.aten


@dataclass
class Converted:
    """The graph with its ports and the tensors that export lifted out of the code."""

    function: GraphFunction
    constants: dict[str, torch.Tensor]
    mode: FakeTensorMode


@dataclass
class _Builder:
    params: ParamTable
    mode: FakeTensorMode
    graph: Graph = field(default_factory=Graph)
    nodes: dict[Node, Node] = field(default_factory=dict)
    needs_grad: set[Node] = field(default_factory=set)
    ports: list[Port] = field(default_factory=list)


def convert(
    exported: ExportedProgram,
    params: ParamTable,
    leaf_names: Sequence[str],
    output_kind: str,
    output_names: Sequence[str],
) -> Converted:
    """Return the exported (functional) program as a GraphFunction; see the module docstring."""
    constants: dict[str, torch.Tensor] = {}
    ports = _input_ports(exported, params, leaf_names, constants)
    build = _Builder(params, FakeMode())
    _add_placeholders(build, exported.graph, ports)
    for node in exported.graph.nodes:
        if node.op == "call_function":
            _add_call(build, node)
    outputs = _user_outputs(exported)
    build.graph.output(tuple(map_arg(tuple(outputs), lambda n: build.nodes[n])))
    kind = LOSS if output_kind == "loss" else OUTPUT
    names = [""] if kind == LOSS else output_names
    function = GraphFunction(
        build.graph, tuple(build.ports), tuple(Port(kind, name) for name in names)
    )
    _sweep(function)
    used = function.named(BUFFER)
    kept = {name: value for name, value in constants.items() if name in used}
    return Converted(function, kept, build.mode)


def _input_ports(
    exported: ExportedProgram,
    params: ParamTable,
    leaf_names: Sequence[str],
    constants: dict[str, torch.Tensor],
) -> dict[str, Port]:
    """Return placeholder name -> port; fill ``constants`` with what was lifted."""
    leaves = iter(leaf_names)
    ports = {}
    for spec in exported.graph_signature.input_specs:
        name = spec.arg.name
        if spec.kind is InputKind.PARAMETER:
            ports[name] = Port(PARAM, params[_inside(spec.target)].fqn)
        elif spec.kind is InputKind.BUFFER:
            ports[name] = Port(BUFFER, params[_inside(spec.target)].fqn)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            port = Port(BUFFER, f"constant.{len(constants)}")
            constants[port.name] = exported.constants[spec.target].detach().cpu()
            ports[name] = port
        elif spec.kind is InputKind.USER_INPUT:
            ports[name] = Port(BATCH, next(leaves))
        else:
            kind = spec.kind.name.lower().replace("_", " ")
            raise CaptureError(
                f"the model reads a {kind} `{spec.target}`", code="AS705", help="use tensors only"
            )
    return ports


def _inside(target: str) -> str:
    """Return a name as the user's model has it: without the wrapper's prefix."""
    return target.removeprefix(MODEL).removeprefix(".")


def _add_placeholders(build: _Builder, graph: Graph, ports: Mapping[str, Port]) -> None:
    """Make one placeholder per port: parameters, buffers, constants, then the batch."""
    order = {spec.fqn: number for number, spec in enumerate(build.params)}
    kinds = (PARAM, BUFFER, BATCH)
    found: dict[Port, list[Node]] = {}
    for node in graph.find_nodes(op="placeholder"):
        found.setdefault(ports[node.name], []).append(node)

    def rank(port: Port) -> tuple[int, int]:
        return kinds.index(port.kind), order.get(port.name, len(order))

    for port in sorted(found, key=rank):
        made = build.graph.placeholder(legal_name(port))
        made.meta["val"] = fake_like(found[port][0].meta["val"], build.mode)
        set_info(made, NodeInfo(path=_home(port)))
        build.nodes.update((old, made) for old in found[port])
        build.ports.append(port)
        if port.kind == PARAM and build.params[port.name].requires_grad:
            build.needs_grad.add(made)


def _home(port: Port) -> str:
    return port.name.rpartition(".")[0] if port.kind == PARAM else ""


def _add_call(build: _Builder, node: Node) -> None:
    """Copy one call in our spelling, or map it to its argument where it says nothing."""
    if node.target in ERASED:
        return
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: build.nodes[n])
    grad = any(build.nodes[n] in build.needs_grad for n in node.all_input_nodes)
    is_detach = node.target is aten.detach.default
    if is_detach and not grad:
        build.nodes[node] = args[0]
        return

    def make(op: object, *args: object, **kwargs: object) -> Node:
        made = build.graph.call_function(op, args, kwargs)
        set_info(made, _origin(node))
        refake(made, build.mode)
        if grad and not is_detach and may_have_gradient(made.meta.get("val")):
            build.needs_grad.add(made)
        return made

    build.nodes[node] = respell(node, args, kwargs, make)


def _origin(node: Node) -> NodeInfo:
    return NodeInfo(path=module_path(node), source=user_line(node.meta.get("stack_trace")))


def module_path(node: Node) -> str:
    """Return the path, in the user's model, of the module that an exported node belongs to."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    path = paths[-1] if paths else ""
    return _inside(path.partition("@")[0])


def _user_outputs(exported: ExportedProgram) -> list[Node]:
    output = next(iter(reversed(exported.graph.nodes)))
    specs = exported.graph_signature.output_specs
    pairs = zip(specs, output.args[0], strict=True)
    return [node for spec, node in pairs if spec.kind is OutputKind.USER_OUTPUT]


def _sweep(function: GraphFunction) -> None:
    """Erase calls nobody reads, then ports nobody reads."""
    for node in reversed(list(function.graph.nodes)):
        if node.op == "call_function" and not node.users:
            function.graph.erase_node(node)
    pairs = list(zip(function.inputs, function.placeholders, strict=True))
    for _, node in pairs:
        if not node.users:
            function.graph.erase_node(node)
    function.inputs = tuple(port for port, node in pairs if node.users)
