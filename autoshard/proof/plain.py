"""The plain model's loss and gradients as terms, made from its captured forward graph.

torch's autograd makes the backward, as it does for the user. The graph is cut between the layers
and each distinct layer is differentiated once: the chain rule over equal layers is the same text.
Nothing of the plan is known here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from autoshard.ir.extract import extract
from autoshard.ir.graph_function import COUNT, LOSS, PARAM, GraphFunction, Port
from autoshard.ir.loss_by_token import loss_by_token
from autoshard.ir.lower import Differentiation, lower
from autoshard.ir.node_info import info, may_have_gradient, val
from autoshard.ir.program import Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ir.rules.call import bound_arguments, shapes_of
from autoshard.ops.vocab import vocab_cross_entropy
from autoshard.proof.normal_form import READINGS
from autoshard.proof.reader import Reader
from autoshard.proof.terms import Terms

_LAYER = re.compile(r"^(.*?\.?\d+)(\.|$)")
IN, OUT, SEED, GRADIENT = "in", "out", "seed", "gradient"


@dataclass(frozen=True)
class PlainGraph:
    """The forward graph before anything parallel was done to it, and what the prelude counted.

    ``trained`` are the parameters that the model has gradients of.
    """

    forward: GraphFunction
    prelude: GraphFunction | None
    trained: frozenset[str]
    constants: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, program: Program, captured: PlainGraph | None = None) -> PlainGraph:
        """Return a copy of what ``program`` holds now.

        What belongs to the model, not to its graph, is that of an earlier copy, where there is one.
        """
        prelude = None if program.prelude is None else program.prelude.clone()
        trained = frozenset(spec.fqn for spec in program.params.trainable())
        constants = dict(program.constants)
        if captured is not None:
            trained, constants = captured.trained, dict(captured.constants)
        return cls(program.forward.clone(), prelude, trained, constants)


@dataclass(frozen=True)
class PlainTerms:
    """What the plain model computes: terms of its outputs, and of each parameter's gradient."""

    outputs: Mapping[Port, int]
    gradients: Mapping[str, int]


@dataclass(frozen=True)
class PlainSide:
    """A plain graph read as terms; many programs may be compared with it."""

    reader: Reader
    wanted: PlainTerms
    counts: Mapping[str, int]
    trained: frozenset[str]
    constants: Mapping[str, torch.Tensor]
    by_token: bool = False  # losses were read token by token, as over a split vocabulary

    @classmethod
    def read(cls, plain: PlainGraph, program: Program) -> PlainSide:
        """Read loss, gradients and counts of the plain graph that ``program`` was made from."""
        reader = Reader(Terms(), shapes_of, READINGS)
        forward = plain.forward
        by_token = _has_split_loss(program) and _has_uncommon_loss(forward)
        if by_token:
            forward = forward.clone()
            _read_by_token(forward)
        wanted = plain_terms(forward, plain.trained, reader)
        counted = counts(plain.prelude, reader)
        return cls(reader, wanted, counted, plain.trained, plain.constants, by_token)


@dataclass
class _Segment:
    """Consecutive nodes of one layer; values of other segments come in and go out."""

    layer: str
    body: list[Node] = field(default_factory=list)
    inputs: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    joint: GraphFunction | None = None
    first_layer: str = ""  # the layer that was differentiated in place of this one


def is_only_compared_fused(program: Program) -> bool:
    """Tell whether a fused operator is in use whose backward has no spelling in plain operators.

    Then the plain graph is the one that holds it, and the fusion is a named rewrite.
    """
    if program.forward is None:
        return False
    op = torch.ops.autoshard.add_rms_norm.default
    return any(node.target is op for node in program.forward.graph.nodes)


def _has_split_loss(program: Program) -> bool:
    graphs = (stage.phases["F"].graph for stage in program.stages if "F" in stage.phases)
    return any(graph.find_nodes(op="call_function", target=vocab_cross_entropy) for graph in graphs)


def _has_uncommon_loss(function: GraphFunction) -> bool:
    """Tell whether a cross entropy has class weights, smoothing or classes in the middle."""
    return any(map(_is_uncommon, _losses(function)))


def _losses(function: GraphFunction) -> Sequence[Node]:
    op = torch.ops.aten.cross_entropy_loss.default
    return function.graph.find_nodes(op="call_function", target=op)


def _is_uncommon(loss: Node) -> bool:
    given = bound_arguments(loss)
    is_map = val(given["self"]).dim() > 2
    return given["weight"] is not None or bool(given["label_smoothing"]) or is_map


def _read_by_token(function: GraphFunction) -> None:
    """Let such losses be spelled as over a split vocabulary, which is whole here."""
    rewriter = Rewriter(function, "erasure")
    for loss in filter(_is_uncommon, _losses(function)):
        with rewriter.before(loss):
            made = loss_by_token(rewriter, loss, "tp", 1)
        rewriter.replace(loss, made[-1])


def plain_terms(function: GraphFunction, trained: Collection[str], reader: Reader) -> PlainTerms:
    """Return the terms of a forward graph's outputs and of the gradients of its loss."""
    segments = _cut(function)
    pulled = _pulled(function, trained)
    loss = function.result(LOSS)
    if loss is not None:
        _differentiate(segments, pulled, loss)
    for port, node in zip(function.inputs, function.placeholders, strict=True):
        reader.env[node] = reader.terms.make(port.kind, (), port.name)
    sweeps = [_Sweep(segment, reader) for segment in segments]
    for sweep in sweeps:
        sweep.forward()
    held: dict[Node, int] = {}
    if loss is not None:
        held[loss] = seed(reader.terms)
        for sweep in reversed(sweeps):
            sweep.backward(held)
    outputs = {
        port: reader.env[node]
        for port, node in zip(function.outputs, function.results, strict=True)
    }
    named = function.named(PARAM).items()
    return PlainTerms(outputs, {name: held[node] for name, node in named if node in held})


def counts(prelude: GraphFunction | None, like: Reader) -> dict[str, int]:
    """Return the terms of what a prelude counts."""
    if prelude is None:
        return {}
    reader = Reader(like.terms, shapes_of, READINGS, makers=like.makers, place="prelude")
    for port, node in zip(prelude.inputs, prelude.placeholders, strict=True):
        reader.env[node] = reader.terms.make(port.kind, (), port.name)
    reader.run(prelude.graph.nodes)
    return {name: reader.env[node] for name, node in prelude.named_results(COUNT).items()}


def seed(terms: Terms) -> int:
    """Return the term of the gradient that backward begins with."""
    return terms.make("tangent", (), "loss")


def _cut(function: GraphFunction) -> list[_Segment]:
    """Cut the graph where the layer changes; a value of several tensors is never cut off."""
    segments: list[_Segment] = []
    place: dict[Node, _Segment] = {}
    for node in function.graph.nodes:
        if node.op != "call_function":
            continue
        layer = _layer(info(node).path)
        parent = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        if parent in place and isinstance(val(parent), (tuple, list)):
            segment = place[parent]
        elif segments and (segments[-1].layer == layer or not _has_input(segments[-1])):
            segment = segments[-1]
        else:
            segments.append(segment := _Segment(layer))
        segment.body.append(node)
        place[node] = segment
    returned = set(function.results)
    for segment in segments:
        inside = set(segment.body)
        read = (n for node in segment.body for n in node.all_input_nodes if n not in inside)
        segment.inputs = list(dict.fromkeys(read))
        segment.outputs = [
            n for n in segment.body if n in returned or any(u not in inside for u in n.users)
        ]
        segment.outputs = [n for n in segment.outputs if isinstance(val(n), torch.Tensor)]
    return segments


def _has_input(segment: _Segment) -> bool:
    return any(node.all_input_nodes for node in segment.body)


def _layer(path: str) -> str:
    match = _LAYER.match(path)
    return match[1] if match else path.split(".")[0]


def _pulled(function: GraphFunction, trained: Collection[str]) -> set[Node]:
    """Return every value that some trained parameter leads to and that can have a gradient."""
    found = {n for name, n in function.named(PARAM).items() if name in trained}
    for node in function.graph.nodes:
        reads = node.op == "call_function" and not found.isdisjoint(node.all_input_nodes)
        if reads and may_have_gradient(val(node)):
            found.add(node)
    return found


def _differentiate(segments: list[_Segment], pulled: set[Node], loss: Node) -> None:
    """Lower the segments, last one first; equal ones once."""
    wanting = {loss}
    known: dict[object, tuple[GraphFunction, str]] = {}
    for segment in reversed(segments):
        key = _structure(segment, pulled, wanting)
        if key not in known:
            known[key] = (_lower(segment, pulled, wanting), segment.layer)
        segment.joint, segment.first_layer = known[key]
        gradients = segment.joint.named_results(GRADIENT)
        wanting |= {segment.inputs[int(name)] for name, n in gradients.items() if n is not None}


def _structure(segment: _Segment, pulled: set[Node], wanting: set[Node]) -> object:
    """Return what two segments share when they compute alike: names left out."""
    number = {node: f"%{i}" for i, node in enumerate([*segment.inputs, *segment.body])}
    texts = []
    for node in segment.inputs:
        value = val(node)
        texts.append(f"{value.dtype}{tuple(value.shape)}{value.stride()}{node in pulled}")
    for node in segment.body:
        args = map_aggregate((node.args, node.kwargs), lambda a: _numbered(a, number))
        texts.append(f"{node.target}{args}")
    texts += [f"{number[node]}{node in wanting and node in pulled}" for node in segment.outputs]
    return tuple(texts)


def _numbered(value: object, number: Mapping[Node, str]) -> object:
    return number[value] if isinstance(value, Node) else value


def _lower(segment: _Segment, pulled: set[Node], wanting: set[Node]) -> GraphFunction:
    ports = [Port(IN, str(i)) for i in range(len(segment.inputs))]
    outputs = [(Port(OUT, str(i)), node) for i, node in enumerate(segment.outputs)]
    function = extract(list(zip(ports, segment.inputs, strict=True)), segment.body, outputs)
    seeds = {p: Port(SEED, p.name) for p, n in outputs if n in wanting and n in pulled}
    gradients = {
        port: Port(GRADIENT, port.name)
        for port, node in zip(ports, segment.inputs, strict=True)
        if node in pulled and may_have_gradient(val(node))
    }
    return lower(function, Differentiation(seeds, gradients if seeds else {}))


class _Sweep:
    """Reads one segment: its values forward, its gradients on the way back."""

    def __init__(self, segment: _Segment, reader: Reader) -> None:
        self.segment = segment
        self.joint = segment.joint
        self.outer = reader
        self.inner = Reader(
            reader.terms,
            shapes_of,
            READINGS,
            makers=reader.makers,
            unread=reader.unread,
            used=reader.used,
            renamed=(segment.first_layer, segment.layer),
        )

    def forward(self) -> None:
        """Give the segment's outputs their terms."""
        if self.joint is None:
            self.outer.run(self.segment.body)
            return
        for name, node in self.joint.named(IN).items():
            self.inner.env[node] = self.outer.env[self.segment.inputs[int(name)]]
        self.inner.run(self.joint.graph.nodes)
        for name, node in self.joint.named_results(OUT).items():
            self.outer.env[self.segment.outputs[int(name)]] = self.inner.env[node]

    def backward(self, held: dict[Node, int]) -> None:
        """Add the segment's share to the gradient of each of its inputs."""
        for name, node in self.joint.named(SEED).items():
            self.inner.env[node] = held[self.segment.outputs[int(name)]]
        self.inner.run(self.joint.graph.nodes)
        for name, node in self.joint.named_results(GRADIENT).items():
            if node is None:
                continue
            source, share = self.segment.inputs[int(name)], self.inner.env[node]
            before = held.get(source)
            held[source] = share if before is None else self.outer.terms.add(before, share)
