"""Drop activations after the forward pass and compute them again in backward.

Chen et al., "Training deep nets with sublinear memory cost" (2016); the choice under a budget is a
knapsack over modules, as in Korthikanti et al. (2022). What runs again stands in the joint graph
beside its first use, so phases, gathers and traffic follow from it; a dropout draws the same mask,
for its mask is a function of the element. This pass does not reorder the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from autoshard.compiler.pass_base import Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.ir.aliases import cheap_base
from autoshard.ir.graph_function import GraphFunction
from autoshard.ir.node_info import info
from autoshard.ir.program import Level, Program, Stage
from autoshard.ir.rewrite import Rewriter
from autoshard.ir.tidy import erase_dead
from autoshard.passes._recompute import (
    RECOMPUTED,
    Regions,
    choose,
    flight,
    rules_of,
)
from autoshard.units import show_bytes


@register
@dataclass(frozen=True)
class MarkRecompute(Pass):
    """Run the forward operations of chosen modules again where backward needs their values.

        u = mm(x, w1); y = gelu(u)           -->  u = mm(x, w1); y = gelu(u)
        ...                                       ...
        du = gelu_backward(dy, u)                 u' = mm(x, w1)
                                                  du = gelu_backward(dy, u')

    `full` keeps what the module reads, `selective` also the results of attention or of matrix
    products, `none` everything. Only what backward needs runs again, collectives included. With
    `budget` the modules are chosen, cheapest per byte first, until the rest fits: `full` ones where
    the plan names some, else repeated blocks.
    """

    name: ClassVar[str] = "mark-recompute"
    group: ClassVar[str] = "recompute"
    level: ClassVar[Level] = Level.JOINT
    assumes: ClassVar[frozenset[str]] = frozenset({"joint"})

    def run(self, program: Program, ctx: PassContext) -> None:
        """Copy the operations of every stage's joint graph that run again."""
        block = ctx.resolved.plan.recompute
        if not program.training or not (ctx.resolved.recompute or block.budget is not None):
            return
        for stage in program.stages:
            if stage.joint is None or stage.phases or _is_done(stage.joint):
                continue
            self._stage(stage, ctx)

    def _stage(self, stage: Stage, ctx: PassContext) -> None:
        assert stage.joint is not None
        regions = Regions(stage.joint, rules_of(stage.joint, ctx.resolved))
        budget = ctx.resolved.plan.recompute.budget
        if budget is not None:
            chosen = choose(regions, budget, flight(ctx.resolved, stage.index))
            ctx.note(f"stage {stage.index}", chosen.summary())
            regions = Regions(stage.joint, chosen.rules)
        before = regions.kept_bytes()
        counts = _repeat(stage.joint, regions.plan(), self.name)
        erase_dead(stage.joint)
        after = Regions(stage.joint, {}).kept_bytes()
        for path, count in counts.items():
            ctx.applied(path, f"{count} operations run again in backward")
        if counts:
            change = f"{show_bytes(before)} -> {show_bytes(after)}"
            ctx.note(f"stage {stage.index}", f"kept per microbatch: {change}")


def _is_done(joint: GraphFunction) -> bool:
    return any(info(node).role == RECOMPUTED for node in joint.graph.nodes)


def _repeat(
    joint: GraphFunction, plan: Mapping[str, frozenset[Node]], pass_name: str
) -> dict[str, int]:
    """Copy each region's operations before the first backward operation that needs one."""
    rewriter = Rewriter(joint, pass_name)
    order = {node: index for index, node in enumerate(joint.graph.nodes)}
    counts: dict[str, int] = {}
    for path, again in plan.items():
        readers = _readers(again)
        if not readers:
            continue
        copies: dict[Node, Node] = {}
        with rewriter.before(min(readers, key=order.__getitem__)):
            for node in sorted(again, key=order.__getitem__):
                copies[node] = rewriter.repeat(node, copies, phase="B", role=RECOMPUTED)
        for reader in readers:
            for node in [n for n in reader.all_input_nodes if n in copies]:
                reader.replace_input_with(node, copies[node])
        counts[path] = sum(cheap_base(n) is n and _is_tensor_op(n) for n in again)
    return counts


def _readers(again: frozenset[Node]) -> list[Node]:
    """Return the operations of backward, as autograd made them, that read any of ``again``."""
    users = dict.fromkeys(user for node in again for user in node.users)
    return [u for u in users if info(u).phase == "B" and info(u).role != RECOMPUTED]


def _is_tensor_op(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)
