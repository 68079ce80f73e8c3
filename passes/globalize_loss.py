"""Make the loss of one micro-batch on one rank a term of the loss of the whole global batch.

A mean over the batch is a sum times one over the *global* count: 1 / (ranks x micro-batches x local
count), or, where tokens are ignored, a NORMALIZER input that the prelude counts before the first
forward. Then losses and gradients of all micro-batches and data-parallel ranks simply add up, and
unequal token counts weigh as they do in one big batch.

The batch dimension is followed through the rule table along the axis "dp": a value is Shard(d)
where samples lie along d, Replicate where it doesn't depend on the batch, Partial where it is a sum
over it. What mixes samples in another way can't be split into micro-batches, and is refused.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import gcd

from torch.fx import Node

from autoshard.compiler.pass_base import Numerics, Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.diagnostics import PassError
from autoshard.ir.graph_function import BATCH, LOSS
from autoshard.ir.node_info import info
from autoshard.ir.placement import PARTIAL, REPLICATE, Partial, Placement, Shard
from autoshard.ir.program import Level, Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ir.rules.call import Choice, call_of, shapes_of, tensor_inputs
from autoshard.ir.rules.table import choose
from autoshard.ir.uniform import Uniformity
from autoshard.ops.dropout import DropoutArgs, dropout
from autoshard.passes._batch_counts import Counts
from autoshard.passes._batch_means import as_sum, count_from_number, scale_replicated

AXIS = "dp"
Outs = tuple[Placement, ...] | None  # None: not known


@register
@dataclass(frozen=True)
class GlobalizeLoss(Pass):
    """Rewrite the loss into a term of the global loss, and type every value over the batch.

    rewrite: ``cross_entropy_loss(x, t)`` --> ``mul(cross_entropy_loss(x, t, sum), normalizer)``
    establishes ``global_loss``; the prelude counts what normalizers stand for.
    """

    name = "globalize-loss"
    group = "capture"
    level = Level.FORWARD
    assumes = frozenset({"canonical"})
    establishes = frozenset({"global_loss"})
    numerics = Numerics.REASSOCIATES

    def run(self, program: Program, ctx: PassContext) -> None:
        """Walk the forward graph once."""
        _BatchTracking(program, ctx).run()


class _BatchTracking:
    def __init__(self, program: Program, ctx: PassContext) -> None:
        self.program, self.ctx = program, ctx
        self.rewriter = Rewriter(program.forward, GlobalizeLoss.name)
        self.terms = program.mesh.size(AXIS) * program.num_microbatches
        self.has_loss = any(port.kind == LOSS for port in program.forward.outputs)
        # With one term in all nothing has to be split, so nothing is refused.
        self.is_strict = self.terms > 1 and self.has_loss
        split = [leaf.shape[0] for leaf in program.leaves if leaf.is_split]
        self.samples = gcd(*split) or 1
        self.counts = Counts(program, self.rewriter)
        self.uniformity = Uniformity(self.samples)
        self.outs: dict[Node, Outs] = {}

    def run(self) -> None:
        leaves = {leaf.name: leaf for leaf in self.program.leaves}
        batch = self.program.forward.named(BATCH)
        for node in self.program.forward.placeholders:
            self.record(node, (REPLICATE,))
        for name, node in batch.items():
            self.record(node, (Shard(0) if leaves[name].is_split else REPLICATE,))
        for node in tuple(self.program.forward.graph.nodes):
            if node.op == "call_function":
                self.visit(node)
        if self.has_loss:
            self.finish()
        self.counts.write_prelude()
        self.rewriter.sweep()

    def visit(self, node: Node) -> None:
        """Type one call, rewriting it where it averages over the batch."""
        if node.target is operator.getitem:
            found = self.outs[node.args[0]]
            self.record(node, None if found is None else (found[node.args[1]],))
            return
        # An input that this pass appended (a normalizer) is the same on every rank.
        ins = tuple(self.outs.get(n, (REPLICATE,)) for n in tensor_inputs(node))
        if any(found is None for found in ins):
            self.record(node, None)
            return
        placements = tuple(found[0] for found in ins)
        if self.is_known_term(node):
            self.record(node, (PARTIAL,))
            return
        made = self.rewritten(node, placements)
        if made is not None:
            for new in made:
                self.visit(new)
            return
        choice = self.choice(node, placements)
        wrong = self.violations(node, placements, choice)
        if wrong and self.is_strict:
            self.refuse(node, wrong[0], choice)
        self.record(node, None if wrong else choice.outs)
        if node.target is dropout and not wrong:
            self.place_dropout(node, choice.outs[0])

    def choice(self, node: Node, ins: tuple[Placement, ...]) -> Choice:
        """Return the rule's choice; shapes are local and samples are never cut."""
        return choose(call_of(node, self.samples, axis=AXIS), ins)

    def rewritten(self, node: Node, ins: tuple[Placement, ...]) -> list[Node] | None:
        """Return what stands in the place of a call that must be made global, or None."""
        if self.terms == 1:
            return None
        return (
            as_sum(self.rewriter, self.counts, node, ins, self.terms)
            or count_from_number(self.rewriter, self.ctx, node, ins, self.samples, self.terms)
            or scale_replicated(self.rewriter, node, ins, self.terms)
            or self.counted(node, ins)
        )

    def is_known_term(self, node: Node) -> bool:
        """Tell whether an earlier run of this pass made the node."""
        return GlobalizeLoss.name in info(node).passes and isinstance(
            info(node).placement(AXIS), Partial
        )

    def counted(self, node: Node, ins: tuple[Placement, ...]) -> list[Node] | None:
        """Replace a batch-only sum that is used in a non-linear way by its global value."""
        if not any(isinstance(placement, Partial) for placement in ins):
            return None
        choice = self.choice(node, ins)
        for value, have, want in zip(tensor_inputs(node), ins, choice.wants, strict=True):
            is_sum = isinstance(have, Partial) and not isinstance(want, Partial)
            if is_sum and self.counts.can_count(value):
                return self.counts.replace_sum(node, value)
        return None

    def violations(
        self, node: Node, ins: tuple[Placement, ...], choice: Choice
    ) -> list[tuple[Node, Placement, Placement]]:
        """Return the inputs that don't lie as the rule wants them."""
        is_unknown = not choice.proven or bool(choice.instead)
        if is_unknown and any(p != REPLICATE for p in ins):
            return [(n, p, REPLICATE) for n, p in zip(tensor_inputs(node), ins, strict=True)]
        triples = zip(tensor_inputs(node), ins, choice.wants, strict=True)
        return [
            (value, have, want)
            for value, have, want in triples
            if have != want and not self.is_constant(value, have, want)
        ]

    def is_constant(self, value: Node, have: Placement, want: Placement) -> bool:
        """Tell whether a replicated value is the same for every sample along the wanted dim."""
        if have != REPLICATE or not isinstance(want, Shard):
            return False
        return self.uniformity.is_uniform(value, want)

    def refuse(self, node: Node, wrong: tuple[Node, Placement, Placement], choice: Choice) -> None:
        value, have, want = wrong
        record = info(node)
        if not choice.proven:
            why = "it has no placement rule, so samples may be mixed"
        elif isinstance(have, Partial):
            why = "it is not linear in a sum over the batch"
        elif isinstance(have, Shard):
            why = "it mixes the samples of a micro-batch"
        else:
            why = "it reads a value that depends on the place in the batch"
        name = getattr(node.target, "__name__", str(node.target))
        place = record.source or f"module '{record.path}'"
        raise PassError(
            f"the loss can't be made global: '{name}' at {place}: {why}",
            code="AS712",
            help="a loss must be a sum or mean of terms of one sample each "
            "(or train with dp = 1 and num_microbatches = 1)",
            notes=f"input {list(shapes_of(value)[0])} is {have}, {want} is needed",
        )

    def record(self, node: Node, outs: Outs) -> None:
        """Write a value's placement over the batch; replicated is the default."""
        self.outs[node] = outs
        if outs and outs[0] != info(node).placement(AXIS):
            placements = {**info(node).placements, AXIS: outs[0]}
            self.rewriter.annotate(node, placements=placements)

    def place_dropout(self, node: Node, placement: Placement) -> None:
        """Tell a dropout where samples lie, so that its mask follows the global sample."""
        args = DropoutArgs(*node.args)
        if not isinstance(placement, Shard):
            return
        if placement.blocks:
            raise PassError(
                f"dropout in '{info(node).path}' ({info(node).source}) sees samples interleaved",
                help="keep the batch dimension first when it is merged with another one",
            )
        rows = shapes_of(node)[0][placement.dim] // self.samples
        placed = args._replace(batch_dim=placement.dim, rows=rows)
        if placed != args:
            self.rewriter.set_args(node, *placed)

    def finish(self) -> None:
        """Make the loss itself a term: one that doesn't depend on the batch is divided."""
        loss = self.program.forward.result(LOSS)
        found = self.outs.get(loss)
        if found is None or found[0] == PARTIAL or self.terms == 1:
            return
        if isinstance(found[0], Shard):
            raise PassError(f"the loss '{loss.name}' has one value for each sample")
        output = self.program.forward.output_node
        with self.rewriter.before(output):
            term = self.scaled(loss)
        output.replace_input_with(loss, term)

    def scaled(self, loss: Node) -> Node:
        (term,) = scale_replicated(self.rewriter, loss, (REPLICATE,), self.terms, alone=True)
        return term
