"""Find how every value lies over the tensor-parallel axis, from the parameters forward.

Each operator's rule (``autoshard/ir/rules``) is asked once, in program order. Where a rule wants
another form of the operator (a row-parallel bias that must come after the sum, an embedding with
split rows), that form is put in its place first. No communication is inserted here.

A packed weight that the plan splits as one block is found here, at the later split of its outputs.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from autoshard.compiler.pass_base import Numerics, Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.dsl.resolve import ResolvedRule
from autoshard.ir.graph_function import PARAM
from autoshard.ir.node_info import info, val
from autoshard.ir.params import ParamSpec
from autoshard.ir.placement import REPLICATE, Partial, Placement, Replicate, Shard
from autoshard.ir.program import Level, Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ir.rules.call import Choice, tensor_inputs
from autoshard.passes._forms import FORMS
from autoshard.passes._placing import Reader, reader_of
from autoshard.passes._refusals import refuse, refuse_unlike
from autoshard.passes._slices import join_slices

UNPROVEN = "unproven: no placement rule for"  # what the remark on an unknown operator begins with


@register
@dataclass(frozen=True)
class PropagatePlacements(Pass):
    """Record the placement of every value, rewriting operators into forms that can be split.

    rewrite: ``linear(x S(2), w S(1), b)`` --> ``linear(x, w)`` P, then ``add(_, b)``
    assumes ``params_placed``; the collectives that the placements ask for are missing until
    insert-collectives.
    """

    name = "propagate-placements"
    group = "tensor"
    level = Level.FORWARD
    assumes = frozenset({"params_placed"})
    breaks = frozenset({"canonical"})
    numerics = Numerics.REASSOCIATES

    axis: str = "tp"  # the mesh axis that weights are split over

    def run(self, program: Program, ctx: PassContext) -> None:
        """Walk the forward graph once; nothing happens on a mesh without the axis."""
        if program.mesh.size(self.axis) > 1:
            _Propagation(program, ctx, reader_of(program, ctx.resolved, self.axis)).run()


class _Propagation:
    def __init__(self, program: Program, ctx: PassContext, reader: Reader) -> None:
        self.program, self.ctx, self.reader = program, ctx, reader
        self.rewriter = Rewriter(program.forward, PropagatePlacements.name)
        self.outs: dict[Node, tuple[Placement, ...]] = {}
        self.rules = _rules_by_node(program, ctx)
        self.scattered: set[Node] = set()  # values split along tokens, from sums
        self.gone: set[Node] = set()  # slices that one split stands for

    def run(self) -> None:
        for fqn, node in self.program.forward.named(PARAM).items():
            spec = self.program.params[fqn]
            self.record(node, (self.unpadded(spec),))
        for node in tuple(self.program.forward.graph.nodes):
            if node.op == "call_function" and node not in self.gone:
                self.visit(node)
        self.rewriter.sweep()

    def unpadded(self, spec: ParamSpec) -> Placement:
        """Return a parameter's placement in terms of its true shape: padding shows as a block."""
        placement = spec.placements.get(self.reader.axis, REPLICATE)
        if spec.padded is None or spec.is_widened:
            return placement
        return replace(placement, blocks=(spec.padded[placement.dim],))

    def visit(self, node: Node) -> None:
        """Record one call's outputs, after putting a better form in its place."""
        if node.target is operator.getitem:
            self.record(node, (self.outs[node.args[0]][node.args[1]],))
            return
        if self.joins_slices(node):
            return
        refuse_unlike(node, self.reader, self.rule_of(node))
        choice = self.reader.choice(node)
        if choice.instead:
            for made in FORMS[choice.instead](self.rewriter, node, self.reader):
                self.visit(made)
            return
        if choice.refusal:
            refuse(node, choice, self.reader, self.rule_of(node), self.ctx)
        elif choice.proven:
            self.note_gathered(node, choice)
        if not choice.proven:
            self.note_unproven(node, choice)
        self.record(node, choice.outs)

    def joins_slices(self, node: Node) -> bool:
        """Put one split in the place of the slices that take a split dimension apart."""
        if node.target is not torch.ops.aten.slice.Tensor:
            return False
        held = self.reader.read(node.args[0])
        if not isinstance(held, Shard):
            return False
        made, gone = join_slices(self.rewriter, node, held.dim)
        self.gone.update(gone)
        for new in made:
            self.visit(new)
        return node in self.gone

    def rule_of(self, node: Node) -> ResolvedRule | None:
        """Return the plan rule behind a call's split input; behind split tokens there is none."""
        split = (n for n in tensor_inputs(node) if n in self.rules and n not in self.scattered)
        return next((self.rules[n] for n in split), None)

    def note_unproven(self, node: Node, choice: Choice) -> None:
        """Say that an operator without a rule had split inputs."""
        split = [n for n in tensor_inputs(node) if not isinstance(self.reader.held(n), Replicate)]
        what = f"gathers {len(split)} inputs" if split else "runs whole on every rank"
        where = f" at {info(node).source}" if info(node).source else ""
        self.ctx.missed(node, f"{UNPROVEN} '{node.target}'{where}; it {what}")

    def note_gathered(self, node: Node, choice: Choice) -> None:
        """Say which split values an operator reads whole, such as the logits of an argmax."""
        if any(not isinstance(out, Replicate) for out in choice.outs):
            return
        for value, want in zip(tensor_inputs(node), choice.wants, strict=True):
            have = self.reader.read(value)
            if isinstance(have, Shard) and want == REPLICATE:
                shape = list(val(value).shape)
                self.ctx.missed(node, f"gathers {shape} {have}: '{node.target}' needs it whole")

    def record(self, node: Node, outs: tuple[Placement, ...]) -> None:
        """Write a node's placement; replicated is the default and is not written."""
        self.outs[node] = outs
        if isinstance(outs[0] if outs else None, Shard) and self.is_of_tokens(node):
            self.scattered.add(node)
        rules = [self.rules[n] for n in node.all_input_nodes if n in self.rules]
        if rules and not isinstance(outs[0], Replicate):
            self.rules.setdefault(node, rules[-1])
        if not outs or outs[0] == info(node).placement(self.reader.axis):
            return
        span = self.rules[node].rule.span if node in self.rules else None
        placements = {**info(node).placements, self.reader.axis: outs[0]}
        self.rewriter.annotate(node, placements=placements, span=span)

    def is_of_tokens(self, node: Node) -> bool:
        """Tell whether a split value is one because sums were scattered, not by a plan's rule."""
        inputs = node.all_input_nodes
        split = [n for n in inputs if not isinstance(self.reader.held(n), Replicate)]
        scattered = (isinstance(self.reader.held(n), Partial) or n in self.scattered for n in split)
        return bool(split) and all(scattered)


def _rules_by_node(program: Program, ctx: PassContext) -> dict[Node, ResolvedRule]:
    """Return the plan rule that placed each parameter's placeholder."""
    by_fqn = {}
    for rule in ctx.resolved.tensor.values():
        for name in (rule.path, f"{rule.path}.weight", f"{rule.path}.bias"):
            if name in program.params:
                by_fqn[program.params[name].fqn] = rule
    nodes = program.forward.named(PARAM)
    return {nodes[fqn]: rule for fqn, rule in by_fqn.items() if fqn in nodes}
