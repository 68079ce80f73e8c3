"""Cut the forward graph into pipeline stages.

The idea of cutting a traced graph instead of rewriting modules is that of torch.distributed's
pipelining and of PiPPy. This pass does not choose a schedule and does not place stages on ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from autoshard.compiler.pass_base import Numerics, Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.ir.aliases import is_view
from autoshard.ir.extract import extract
from autoshard.ir.graph_function import (
    BATCH,
    BOUNDARY,
    BUFFER,
    NORMALIZER,
    PARAM,
    RNG,
    GraphFunction,
    Port,
)
from autoshard.ir.node_info import info
from autoshard.ir.program import Level, Program, Stage
from autoshard.ir.rewrite import Rewriter
from autoshard.ops.library import spec
from autoshard.passes._border_norms import addends, take_apart_at_borders
from autoshard.passes._cut_points import Cut, find_cuts
from autoshard.passes._scatter_boundary import BoundaryScatter
from autoshard.passes._schedules import stage_ranks

aten = torch.ops.aten
Ported = tuple[Port, Node]

# Inputs that every stage has or can have; what follows from them alone is computed where needed.
_EVERYWHERE = frozenset({BATCH, BUFFER, NORMALIZER, RNG})


@register
@dataclass(frozen=True)
class CutStages(Pass):
    """Divide the forward graph into one graph per pipeline stage.

        loss = f(params, batch)  -->  stage 0: boundary x = f0(params, batch)
                                      stage 1: loss = f1(boundary x, params, batch)

    A value that skips stages is relayed by those in between. What follows from the batch and from
    buffers alone (masks, positions, rotary tables) is computed again by each stage that reads it:
    it is never sent and never asked for a gradient. A view is remade by the reader when that sends
    no more. A fused add + norm that a stage would begin with is taken apart: its sum crosses, not
    both terms. Values cross in contiguous form. With `scatter_boundary` a value that all tensor
    parallel ranks hold is sent in parts and gathered. Costs: one send per value and microbatch.
    """

    name: ClassVar[str] = "cut-stages"
    group: ClassVar[str] = "pipeline"
    level: ClassVar[Level] = Level.FORWARD
    establishes: ClassVar[frozenset[str]] = frozenset({"staged"})
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATES

    def run(self, program: Program, ctx: PassContext) -> None:
        """Replace ``program.forward`` by ``program.stages``; find out where parameters live."""
        if program.forward is None:
            return
        plan = ctx.resolved.plan
        ranks = stage_ranks(ctx.resolved)
        count = len(ranks)
        split = (plan.pipeline.split, count, plan.span("pipeline.split"))
        cuts = find_cuts(program.forward, *split)
        layout = _Layout(program.forward, cuts)
        for norm in take_apart_at_borders(program.forward, layout.begins_with_sum, self.name):
            ctx.applied(norm, "add and norm taken apart, so that only their sum crosses")
            cuts = find_cuts(program.forward, *split)  # positions have moved
        program.stages = _divide(program.forward, cuts)
        program.forward = None
        choice, place = plan.pipeline.scatter_boundary, plan.span("pipeline.scatter_boundary")
        BoundaryScatter(program, ranks, choice, place, self.name).run(program.stages, ctx)
        _note_homes(program)
        _report(program, cuts, ctx)


def _divide(function: GraphFunction, cuts: Sequence[Cut]) -> list[Stage]:
    """Build the stages from the last to the first: each asks the one before for its inputs."""
    layout = _Layout(function, cuts)
    names = _BoundaryNames()
    wanted = [(port, node) for port, node in zip(function.outputs, function.results, strict=True)]
    stages = []
    for index in range(len(cuts), -1, -1):
        body, crossing = layout.body(index, [node for _, node in wanted])
        arriving = [(names.port(node), node) for node in crossing]
        ported = zip(function.inputs, function.placeholders, strict=True)
        forward = extract([*ported, *arriving], body, wanted)
        stages.append(Stage(index, _settle(forward)))
        wanted = arriving
    return stages[::-1]


class _Layout:
    """Which node runs in which stage."""

    def __init__(self, function: GraphFunction, cuts: Sequence[Cut]) -> None:
        self._order = {node: i for i, node in enumerate(function.graph.nodes)}
        bounds = [cut.position for cut in cuts]
        self._stage: dict[Node, int] = {}
        self._free: set[Node] = set()  # follows from inputs that every stage has
        ports = zip(function.inputs, function.placeholders, strict=True)
        self._inputs = set(function.placeholders)
        self._free |= {node for port, node in ports if port.kind in _EVERYWHERE}
        for node in function.graph.nodes:
            if node.op != "call_function":
                continue
            # An item of a tuple goes with the tuple: only tensors cross.
            picks = _is_pick(node)
            self._stage[node] = (
                self._stage[node.args[0]] if picks else bisect_right(bounds, self._order[node])
            )
            if not _communicates(node) and self._free.issuperset(node.all_input_nodes):
                self._free.add(node)

    def body(self, stage: int, wanted: Iterable[Node]) -> tuple[list[Node], list[Node]]:
        """Return what ``stage`` computes to give ``wanted``, and what it needs from before."""
        computed: set[Node] = set()
        crossing: set[Node] = set()
        pending = list(wanted)
        while pending:
            node = pending.pop()
            if node in self._inputs or node in computed or node in crossing:
                continue
            if self._runs_in(node, stage):
                computed.add(node)
                pending += node.all_input_nodes
            else:
                crossing.add(node)
        return sorted(computed, key=self._order.get), sorted(crossing, key=self._order.get)

    def begins_with_sum(self, node: Node) -> bool:
        """Tell whether both values that a fused norm adds come from an earlier stage."""
        crossing = (
            arg.op == "call_function" and not self._runs_in(arg, self._stage[node])
            for arg in addends(node)
        )
        return all(crossing)

    def _runs_in(self, node: Node, stage: int) -> bool:
        return self._stage[node] == stage or node in self._free or _is_free_view(node)


def _is_pick(node: Node) -> bool:
    return bool(node.args) and isinstance(node.args[0], Node) and not _is_tensor(node.args[0])


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta["val"], torch.Tensor)


def _is_free_view(node: Node) -> bool:
    """Tell whether sending the value that ``node`` is a view of costs no more than sending it."""
    if not is_view(node) or _is_pick(node) or not _is_tensor(node):
        return False
    return node.args[0].meta["val"].numel() <= node.meta["val"].numel()


def _communicates(node: Node) -> bool:
    operator = spec(node.target)
    if operator is None:
        return False
    args = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in node.args]
    return bool(operator.traffic(*args))


class _BoundaryNames:
    """Names boundary values after the module that makes them."""

    def __init__(self) -> None:
        self._ports: dict[Node, Port] = {}

    def port(self, node: Node) -> Port:
        """Return the port of a value, the same wherever it crosses."""
        if node not in self._ports:
            path = info(node).path or "root"
            taken = {port.name for port in self._ports.values()}
            names = (path if n == 1 else f"{path}#{n}" for n in range(1, len(taken) + 2))
            self._ports[node] = Port(BOUNDARY, next(name for name in names if name not in taken))
        return self._ports[node]


def _settle(forward: GraphFunction) -> GraphFunction:
    """Let boundary values be contiguous on both sides, as they arrive from another rank."""
    rewriter = Rewriter(forward, CutStages.name)
    arrived = forward.named(BOUNDARY).values()
    scattered = [node for node in arrived if not node.meta["val"].is_contiguous()]
    for node in scattered:
        node.meta["val"] = node.meta["val"].new_empty(node.meta["val"].shape)
    for node in forward.graph.nodes if scattered else ():
        if node.op == "call_function":
            rewriter.refake(node)
    results = [
        _contiguous(rewriter, port, node)
        for port, node in zip(forward.outputs, forward.results, strict=True)
    ]
    forward.set_outputs(results, forward.outputs)
    return forward


def _contiguous(rewriter: Rewriter, port: Port, node: Node | None) -> Node | None:
    if port.kind != BOUNDARY or node.meta["val"].is_contiguous():
        return node
    with rewriter.before(rewriter.function.output_node):
        return rewriter.call(
            aten.clone.default, node, like=node, memory_format=torch.contiguous_format
        )


def _note_homes(program: Program) -> None:
    homes: dict[str, list[int]] = {}
    for stage in program.stages:
        for kind in (PARAM, BUFFER):
            for name in stage.forward.named(kind):
                homes.setdefault(name, []).append(stage.index)
    for entry in list(program.params):
        program.params.update(entry.fqn, homes=tuple(homes.get(entry.fqn, ())))


def _report(program: Program, cuts: Sequence[Cut], ctx: PassContext) -> None:
    for stage, cut in zip(program.stages[1:], cuts, strict=True):
        names = ", ".join(stage.forward.named(BOUNDARY)) or "nothing"
        ctx.applied(cut.path, f"stage {stage.index} begins here and receives {names}")
    for entry in program.params:
        if len(entry.homes) > 1 and not entry.is_buffer:
            stages = ", ".join(map(str, entry.homes))
            ctx.note(entry.fqn, f"used by stages {stages}: their gradients are summed")
