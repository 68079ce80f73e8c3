"""Let collectives of activations run beside computation that does not need them.

Megatron-LM starts the sum of an input gradient before it computes the weight gradient; here that is
an order of the printed graph, so it can change no number. This pass cuts no product into pieces to
have something to compute meanwhile, and leaves collectives of parameters to the passes of ZeRO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autoshard.compiler.pass_base import Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.diagnostics import PassError
from autoshard.ir.buckets import COMPUTE_PHASES
from autoshard.ir.graph_function import GraphFunction
from autoshard.ir.program import Level, Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ops.collectives import STARTS
from autoshard.passes._beside import Part, computes, find_parts
from autoshard.passes._live_bytes import Units
from autoshard.passes._starts import split
from autoshard.passes._zero import ZeroPolicy


@register
@dataclass(frozen=True)
class OverlapCollectives(Pass):
    """Start a collective once its operand is there and wait for it before its first reader.

        dx = mm(dy, w)                       dx = mm(dy, w)
        dw = mm(t(dy), x)               -->  s = all_reduce_start(dx, "tp")
        g = all_reduce(dx, "tp")             dw = mm(t(dy), x)
        ... reads g                          g = wait(s)
                                             ... reads g

    What a collective does not need is put between: nearest first, until it takes as long as the
    bytes do. So what those nodes read lives longer; none is moved whose move would raise the
    phase's peak. With ZeRO 2 and 3, which reduce within the phase, no moment may need more than it
    did: few products move. A collective with nothing beside it stays whole: all of a forward's, and
    those of an input gradient's phase where weight gradients have one of their own.
    """

    name: ClassVar[str] = "overlap-collectives"
    group: ClassVar[str] = "joint"
    level: ClassVar[Level] = Level.JOINT
    assumes: ClassVar[frozenset[str]] = frozenset({"phased"})

    flops_per_byte: int = 4096  # of the result; about what an H100 computes while NVLink sums it

    def run(self, program: Program, ctx: PassContext) -> None:
        """Reorder every phase and split its collectives."""
        if self.flops_per_byte < 1:
            raise PassError(
                f"option 'flops_per_byte' of '{self.name}' can't be {self.flops_per_byte}",
                help="at least 1: operations to compute for each byte on its way",
            )
        units = _units(program, ZeroPolicy.of(ctx.resolved))
        for stage in program.stages:
            for phase in COMPUTE_PHASES:
                if phase in stage.phases and not _is_split(stage.phases[phase]):
                    where = f"stage {stage.index} {phase}"
                    self._overlap(stage.phases[phase], units, where, ctx)

    def _overlap(self, function: GraphFunction, units: Units, where: str, ctx: PassContext) -> None:
        parts = find_parts(function, self.flops_per_byte, units)
        if not parts:
            return
        _reorder(function, parts)
        count = _split(Rewriter(function, self.name), parts)
        if count:
            ctx.applied(where, f"{count} of {len(parts)} collectives run beside computation")
        full = [part.whole for part in parts if part.is_full]
        if full:
            ctx.missed(where, f"more beside {len(full)} of them would raise the peak")


def _units(program: Program, policy: ZeroPolicy) -> Units:
    """Return the units of the parameters that ZeRO gathers and reduces in the phases."""
    globs = policy.globs()
    cut = {s.fqn: policy.unit(s.fqn, globs) for s in program.params if policy.cuts(s, program)}
    gathered = cut if policy.gathers_in_graphs else {}
    return Units(gathered, cut if policy.reduces_per_microbatch else {})


def _is_split(function: GraphFunction) -> bool:
    return any(node.target in STARTS for node in function.graph.nodes)


def _reorder(function: GraphFunction, parts: Sequence[Part]) -> None:
    """Put the nodes of all parts in their new order; what stands behind them stays there."""
    order = [node for part in parts for node in part.nodes]
    anchor = function.placeholders[-1]
    for node in order:
        anchor.append(node)
        anchor = node


def _split(rewriter: Rewriter, parts: Sequence[Part]) -> int:
    """Split the collectives that have anything beside them and return how many."""
    order = list(rewriter.graph.nodes)
    places = {node: index for index, node in enumerate(order)}
    count = 0
    for whole in (part.whole for part in parts):
        first = min(whole.users, key=places.__getitem__)
        if any(map(computes, order[places[whole] + 1 : places[first]])):
            split(rewriter, whole, first)
            count += 1
    return count
