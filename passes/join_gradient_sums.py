"""Sum the gradients of whole parameters in split regions together, not one by one.

A norm's weight that acts on this rank's tokens, or a bias behind a row-parallel product, is whole
on every rank, but its gradient there is a term: lowering leaves an all_reduce for each. They are
small and many; joined, a stage needs one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch.fx import Node

from autoshard.compiler.pass_base import Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.diagnostics import PassError
from autoshard.ir.graph_function import GRAD, GraphFunction
from autoshard.ir.node_info import val
from autoshard.ir.program import Level, Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ops.collectives import all_reduce
from autoshard.passes._zero import ZeroPolicy

aten = torch.ops.aten
GROUPS = ("auto", "stage", "unit", "parameter")
Key = tuple[str, torch.dtype]


@register
@dataclass(frozen=True)
class JoinGradientSums(Pass):
    """Replace the all_reduces of single gradients by one over all of them.

        dw = all_reduce(dw', "tp")      -->  s = all_reduce(cat([dw', db']), "tp")
        db = all_reduce(db', "tp")           dw = slice(s, ...); db = slice(s, ...)

    The sum waits for the last of its terms. So where ZeRO reduces each unit's gradients as soon as
    backward has passed it, there is one sum for each unit; else one for each stage and micro-batch.
    Costs the bytes of the gradients once more, for their copy.
    """

    name: ClassVar[str] = "join-gradient-sums"
    group: ClassVar[str] = "joint"
    level: ClassVar[Level] = Level.JOINT
    assumes: ClassVar[frozenset[str]] = frozenset({"joint"})

    axis: str = "tp"  # the mesh axis that is summed over
    per: str = "auto"  # what shares a sum: "stage", "unit" (of ZeRO), "parameter", "auto"

    def run(self, program: Program, ctx: PassContext) -> None:
        """Join the sums in the joint graph of every stage."""
        if self.per not in GROUPS:
            raise PassError(
                f"option 'per' of '{self.name}' can't be '{self.per}'",
                help=f"one of: {', '.join(GROUPS)}",
            )
        unit = self._grouping(ZeroPolicy.of(ctx.resolved))
        for stage in program.stages:
            if stage.joint is None or stage.phases or self.per == "parameter":
                continue
            for (name, _), sums in _find(stage.joint, self.axis, unit).items():
                if len(sums) > 1:
                    _join(Rewriter(stage.joint, self.name), sums, self.axis)
                    where = f"stage {stage.index}" + (f", {name}" if name else "")
                    ctx.applied(where, f"one sum over {self.axis} for {len(sums)} gradients")

    def _grouping(self, policy: ZeroPolicy) -> ZeroPolicy | None:
        """Return the policy that names units, None to join all of a stage."""
        by_unit = policy.reduces_per_microbatch and policy.size > 1
        return policy if self.per == "unit" or (self.per == "auto" and by_unit) else None


def _find(joint: GraphFunction, axis: str, policy: ZeroPolicy | None) -> dict[Key, list[Node]]:
    """Return the sums that only give gradients, by unit and type, in program order."""
    globs = policy.globs() if policy else ()
    named = {node: fqn for fqn, node in joint.named_results(GRAD).items() if node is not None}
    found: dict[Key, list[Node]] = {}
    for node in joint.graph.nodes:
        if node.target is not all_reduce or node.args[1] != axis or node not in named:
            continue
        if all(user.op == "output" for user in node.users):
            unit = policy.unit(named[node], globs) if policy else ""
            found.setdefault((unit, val(node).dtype), []).append(node)
    return found


def _join(rewriter: Rewriter, sums: list[Node], axis: str) -> None:
    """Put one sum behind the last of those it replaces."""
    last = sums[-1]
    with rewriter.before(last.next):
        flat = [_reshaped(rewriter, node.args[0], (-1,), node) for node in sums]
        joined = rewriter.call(aten.cat.default, flat, like=last)
        total = rewriter.call(all_reduce, joined, axis, like=last)
        start = 0
        for node in sums:
            end = start + prod(val(node).shape)
            part = rewriter.call(aten.slice.Tensor, total, 0, start, end, like=node)
            start = end
            rewriter.replace(node, _reshaped(rewriter, part, tuple(val(node).shape), node))


def _reshaped(rewriter: Rewriter, value: Node, shape: tuple[int, ...], like: Node) -> Node:
    given = val(value)
    if tuple(given.shape) == shape or (shape == (-1,) and given.dim() == 1):
        return value
    op = aten.view.default if given.is_contiguous() else aten.reshape.default
    return rewriter.call(op, value, list(shape), like=like)
