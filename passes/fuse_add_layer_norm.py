"""Fuse a residual add and the LayerNorm that reads it into one op that returns both.

A pre-LN Transformer adds to the residual stream and normalises the sum at once: two ops that read
the stream twice. The fused op (after apex's and flash-attention's fused norms) reads both terms
once and returns the normalised value *and* the sum, which the next residual needs.

Does not fuse: an add that broadcasts or scales, a norm over more than the last dimension, an add
that lies behind the norm of another (each such near miss is a remark).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from autoshard.compiler.pass_base import Numerics, Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.dsl.globs import Glob
from autoshard.ir.graph_function import GraphFunction
from autoshard.ir.node_info import info, val
from autoshard.ir.program import Level, Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ops import add_layer_norm as _ops  # noqa: F401  (registers the op)
from autoshard.source import Span

aten = torch.ops.aten
DEFAULTS = (None, None, 1e-5)  # layer_norm's weight, bias, eps


@dataclass(frozen=True)
class Match:
    """One site: ``norm`` reads ``add``; or why it can't be fused."""

    norm: Node
    add: Node
    reason: str = ""


@register
@dataclass(frozen=True)
class FuseAddLayerNorm(Pass):
    """Replace ``layer_norm(x + r)`` by ``add_layer_norm(x, r)``.

    before:  s = add(x, r); y = layer_norm(s, [D], weight, bias, eps)
    after:   out = add_layer_norm(x, r, weight, bias, eps); y = out[0]; s = out[1]

    Assumes the canonical spelling; forward bytes per site 5 -> 4, backward 6 -> 4.
    """

    name = "fuse-add-layer-norm"
    group = "fuse"
    level = Level.FORWARD
    assumes = frozenset({"canonical"})
    numerics = Numerics.REASSOCIATES

    def run(self, program: Program, ctx: PassContext) -> None:
        """Fuse every site that the plan's ``fuse`` block admits."""
        setting = ctx.resolved.plan.fuse
        if setting.add_layer_norm == "off":
            return
        rewriter = Rewriter(program.forward, self.name)
        span = ctx.resolved.plan.span("fuse.add_layer_norm")
        for match in find(program.forward.graph):
            reason = match.reason or _not_chosen(match.norm, setting.only)
            if reason:
                ctx.missed(match.norm, reason)
                continue
            _fuse(rewriter, match, span)
            ctx.applied(match.norm, f"residual add of '{info(match.add).path}' fused")


def find(graph: Graph) -> tuple[Match, ...]:
    """Return every layer_norm whose input is an add, with the reason where it can't be fused."""
    taken: set[Node] = set()
    found = []
    for norm in graph.find_nodes(op="call_function", target=aten.layer_norm.default):
        add = norm.args[0]
        if add.target is not aten.add.Tensor:
            continue
        reason = "its sum is fused with another norm" if add in taken else _obstacle(norm, add)
        if not reason:
            taken.add(add)
        found.append(Match(norm, add, reason))
    return tuple(found)


def count_sites(function: GraphFunction) -> int:
    """Return the number of fused sites in a graph."""
    op = torch.ops.autoshard.add_layer_norm.default
    return len(function.graph.find_nodes(op="call_function", target=op))


def _obstacle(norm: Node, add: Node) -> str:
    x, residual = add.args[:2]
    if not isinstance(x, Node) or not isinstance(residual, Node):
        return "the add has a constant term"
    if add.kwargs.get("alpha", 1) != 1:
        return "the add scales its second term"
    if val(x).shape != val(residual).shape:
        return f"the add broadcasts {list(val(residual).shape)} to {list(val(add).shape)}"
    if len({val(n).dtype for n in (x, residual, norm)}) > 1:
        return "the add or the norm changes the dtype"
    if len(norm.args[1]) != 1:
        return f"the norm is over the last {len(norm.args[1])} dimensions"
    if any(isinstance(a, Node) and a.op != "placeholder" for a in norm.args[2:4]):
        return "the norm's weight is computed"
    return ""


def _not_chosen(norm: Node, only: tuple[str, ...]) -> str:
    path = info(norm).path
    chosen = not only or any(Glob(glob).matches(path) for glob in only)
    return "" if chosen else "'fuse { only = ... }' does not name it"


def _fuse(rewriter: Rewriter, match: Match, span: Span | None) -> None:
    norm, add = match.norm, match.add
    weight, bias, eps = (*norm.args[2:5], *DEFAULTS[len(norm.args) - 2 :])
    op = torch.ops.autoshard.add_layer_norm.default
    with rewriter.before(add):
        fused = rewriter.call(op, *add.args[:2], weight, bias, eps, like=norm, span=span)
        y = rewriter.call(operator.getitem, fused, 0, like=norm, span=span)
        total = rewriter.call(operator.getitem, fused, 1, like=add, span=span)
    rewriter.replace(norm, y)
    rewriter.replace(add, total)
