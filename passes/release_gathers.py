"""Release gathered parameters right after their last use.

FSDP's resharding and DeepSpeed's release, as lines of the printed graph. The memory goes where
generated code deletes the value, at the release; this pass makes that place visible. What stays
whole for backward all the same is `keep-gathers`' choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autoshard.compiler.pass_base import Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.ir.aliases import lifetime_end
from autoshard.ir.buckets import COMPUTE_PHASES, gathers_of, kept_buckets
from autoshard.ir.graph_function import GraphFunction
from autoshard.ir.program import Level, Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ops.collectives import release
from autoshard.passes._gathers import whole_bucket


@register
@dataclass(frozen=True)
class ReleaseGathers(Pass):
    """Mark where each gathered bucket dies.

    y = mm(x, view_at(g))  -->  y = mm(x, view_at(g))
    ...                         release(g)
                                ...
    """

    name: ClassVar[str] = "release-gathers"
    group: ClassVar[str] = "zero"
    level: ClassVar[Level] = Level.JOINT
    assumes: ClassVar[frozenset[str]] = frozenset({"bucketed"})
    establishes: ClassVar[frozenset[str]] = frozenset({"bounded"})

    def run(self, program: Program, ctx: PassContext) -> None:
        """Insert a release for every gathered bucket of every compute phase."""
        for stage in program.stages:
            for phase in COMPUTE_PHASES:
                if phase in stage.phases:
                    _release(stage.phases[phase])


def _release(function: GraphFunction) -> None:
    rewriter = Rewriter(function, ReleaseGathers.name)
    gathered = map(whole_bucket, gathers_of(function).values())
    for whole in (*kept_buckets(function).values(), *gathered):
        if any(user.target is release for user in whole.users):
            continue
        order = {node: index for index, node in enumerate(function.graph.nodes)}
        last = lifetime_end(whole, order)
        if last.op == "output":
            continue
        with rewriter.after(last):
            rewriter.call(release, whole, like=whole, placements={})
