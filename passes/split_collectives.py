"""Split collectives on flat buckets into a start and a wait.

Asynchronous collectives as two graph nodes are XLA's and Inductor's. This pass places waits as late
as their users allow; moving starts earlier is `prefetch-gathers`' work, and collectives of
activations are `overlap-collectives`'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from autoshard.compiler.pass_base import Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.diagnostics import PassError
from autoshard.ir.buckets import uncast
from autoshard.ir.graph_function import ACCUMULATED, FLAT, GraphFunction
from autoshard.ir.program import Level, Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ops import collectives as ops
from autoshard.passes._starts import STARTS, split


@register
@dataclass(frozen=True)
class SplitCollectives(Pass):
    """Make gathers and reductions of buckets asynchronous.

        g = all_gather(flat)            -->  s = all_gather_start(flat)
        y = mm(x, view_at(g))                g = wait(s)
                                             y = mm(x, view_at(g))
        return reduce_scatter(packed)   -->  s = reduce_scatter_start(packed) ... return wait(s)

    A wait stands right before the first use of its result; one whose result is only returned, at
    the end, but no more than `reductions_in_flight` reductions are under way at once: each holds a
    whole bucket.
    """

    name: ClassVar[str] = "split-collectives"
    group: ClassVar[str] = "zero"
    level: ClassVar[Level] = Level.JOINT
    assumes: ClassVar[frozenset[str]] = frozenset({"bucketed"})

    reductions_in_flight: int = 1  # one under way while the next bucket fills

    def run(self, program: Program, ctx: PassContext) -> None:
        """Split the bucket collectives of every phase graph."""
        if self.reductions_in_flight < 1:
            raise PassError(
                f"option 'reductions_in_flight' of '{self.name}' can't be "
                f"{self.reductions_in_flight}",
                help="at least 1: a reduction that is under way when it is waited for",
            )
        for stage in program.stages:
            for phase, function in stage.phases.items():
                _split(function)
                if phase not in ("U", "R"):
                    _bound_reductions(function, self.reductions_in_flight)


def _split(function: GraphFunction) -> None:
    """Replace each bucket collective by its start, in place, and its wait, at its first use."""
    rewriter = Rewriter(function, SplitCollectives.name)
    order = {node: index for index, node in enumerate(function.graph.nodes)}
    for node in _collectives(function):
        first = min(node.users, key=order.__getitem__)
        _, wait = split(rewriter, node, first)
        order[wait] = order[first]


def _collectives(function: GraphFunction) -> list[Node]:
    """Return the collectives whose input is a bucket: stored, accumulated or just packed."""
    buckets = {*function.named(FLAT).values(), *function.named(ACCUMULATED).values()}
    return [
        node
        for node in function.graph.nodes
        if node.target in STARTS
        and (uncast(node.args[0]) in buckets or node.args[0].target is ops.pack)
    ]


def _bound_reductions(function: GraphFunction, limit: int) -> None:
    """Move waits forward so that at most ``limit`` reductions are under way."""
    scatters = (n for n in function.graph.nodes if n.target is ops.reduce_scatter_start)
    starts = [n for n in scatters if n.args[0].target is ops.pack]
    for earlier, later in zip(starts, starts[limit:], strict=False):
        (wait,) = earlier.users
        packed = later.args[0]
        packed.prepend(wait)
