"""Make the loss that of the global batch: all micro-batches of all data parallel ranks.

A mean over a micro-batch is not a share of the mean over the batch: the counts of valid tokens
differ (the "gradient accumulation bug" of many trainers). Here each mean over the batch becomes a
sum and a factor that is known globally: a constant, or a count that a small prelude program makes
before the first forward.

The batch is an axis like any other: every value is placed over ``dp`` by the rule table (local
shapes; micro-batches lie as ranks do). What mixes samples any other way than by a sum has no
global form and is refused with its source line. Does not change what one micro-batch on one rank
computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from autoshard.compiler.pass_base import Numerics, Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.ir.graph_function import BATCH, LOSS, OUTPUT
from autoshard.ir.node_info import val
from autoshard.ir.placement import PARTIAL, REPLICATE, Partial, Placement, Shard
from autoshard.ir.program import Level, Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ops.dropout import DropoutArgs, dropout
from autoshard.passes._batch_axis import BatchAxis, refuse_mixing
from autoshard.passes._loss_forms import globalize_mean


@register
@dataclass(frozen=True)
class GlobalizeLoss(Pass):
    """Turn means over the batch into sums times a global factor.

    before:  loss = cross_entropy_loss(logits, labels)
    after:   loss = mul(cross_entropy_loss(logits, labels, reduction=sum), normalizer:0)

    Establishes that the loss is Partial over dp: summed over ranks and micro-batches it is the
    loss of the global batch. Costs one count per micro-batch and one all_reduce of it per step.
    """

    name = "globalize-loss"
    group = "capture"
    level = Level.FORWARD
    assumes = frozenset({"canonical"})
    establishes = frozenset({"global_loss"})
    numerics = Numerics.REASSOCIATES

    def run(self, program: Program, ctx: PassContext) -> None:
        """Place every value over dp, rewriting means on the way, then check the loss."""
        function = program.forward
        rewriter = Rewriter(function, self.name)
        terms = program.mesh.size("dp") * ctx.resolved.num_microbatches
        axis = BatchAxis(rewriter, terms)
        split = {leaf.name for leaf in program.leaves if leaf.is_split}
        for name, node in function.named(BATCH).items():
            axis.record(node, Shard(0) if name in split else REPLICATE)
        for node in tuple(function.graph.nodes):
            if node.op != "call_function":
                continue
            mean = globalize_mean(program, rewriter, axis, node)
            for made in mean or (node,):
                axis.visit(made)
            _number_samples(rewriter, axis, node)
        _check_results(program, axis)


def _number_samples(rewriter: Rewriter, axis: BatchAxis, node: Node) -> None:
    """Tell a dropout where its samples lie, so that its mask follows the global sample."""
    if node.target is not dropout:
        return
    placement = axis.held(node)
    if not isinstance(placement, Shard):
        return
    args = DropoutArgs(*node.args)
    rows = val(node).shape[placement.dim] // axis.samples
    if (args.batch_dim, args.rows) != (placement.dim, rows):
        rewriter.set_args(node, *args._replace(batch_dim=placement.dim, rows=rows))


def _check_results(program: Program, axis: BatchAxis) -> None:
    """Refuse a loss that is not a sum over samples, when there is more than one term."""
    if axis.terms == 1:
        return
    named = program.forward.named_results(LOSS)
    for node in named.values():
        placement: Placement = axis.held(node)
        if not isinstance(placement, Partial):
            refuse_mixing(node, f"the loss is {placement} over the batch, not a sum or a mean")
    for node in program.forward.named_results(OUTPUT).values():
        if node is not None and axis.held(node) == PARTIAL:
            refuse_mixing(node, "an output is a sum over the samples of one micro-batch")
