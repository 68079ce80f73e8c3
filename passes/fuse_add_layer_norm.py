"""Fuse a residual add and the norm that reads it into one op that returns both.

A pre-LN Transformer adds to the residual stream and normalises the sum at once: two ops that read
the stream twice. The fused op (after apex's and flash-attention's fused norms) reads both terms
once and returns the normalised value *and* the sum, which the next residual needs. Where dropout,
and the bias of the linear layer under it, come right before the add of a LayerNorm, they join in.

Norms are found however they are spelled (see ``_norm_sites``). Not fused: an add that broadcasts or
scales, a norm over more than the last dimension, a second norm of one sum. Each such near miss is a
remark.
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
from autoshard.ops import add_layer_norm as _layer_norm  # noqa: F401  (registers the op)
from autoshard.ops import add_rms_norm as _rms_norm  # noqa: F401
from autoshard.ops.bias_dropout_add_layer_norm import bias_dropout_add_layer_norm
from autoshard.ops.dropout import dropout
from autoshard.passes._norm_sites import LAYER, Norm, find_norms
from autoshard.source import Span

aten = torch.ops.aten
ours = torch.ops.autoshard
FUSED = (
    ours.add_layer_norm.default,
    ours.add_rms_norm.default,
    bias_dropout_add_layer_norm,
)
_BIASED = {aten.linear.default: 2, aten.addmm.default: 0}  # op -> place of its bias


@dataclass(frozen=True)
class Match:
    """One site: ``norm`` reads ``add``; or why it can't be fused."""

    norm: Norm
    add: Node
    reason: str = ""


@register
@dataclass(frozen=True)
class FuseAddLayerNorm(Pass):
    """Replace ``norm(x + r)`` by ``add_layer_norm(x, r)`` or its kin.

    before:  s = add(x, r); y = layer_norm(s, [D], weight, bias, eps)
    after:   out = add_layer_norm(x, r, weight, bias, eps); y = out[0]; s = out[1]

    and alike: ``rms_norm(s)``, also spelled out --> ``add_rms_norm``; ``s = dropout(linear(x, w,
    b)) + r`` --> ``bias_dropout_add_layer_norm(linear(x, w), b, r, ...)``. Assumes the canonical
    spelling. Forward bytes per site 5 -> 4 (9 -> 4 with bias and dropout), backward 6 -> 4.
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
        program.kernels = setting.add_layer_norm
        rewriter = Rewriter(program.forward, self.name)
        span = ctx.resolved.plan.span("fuse.add_layer_norm")
        for match in find(program.forward.graph):
            reason = match.reason or _not_chosen(match.norm.result, setting.only)
            if reason:
                ctx.missed(match.norm.result, reason)
                continue
            path = info(match.add).path
            fused = _fuse(rewriter, match, span)
            op = fused.target._schema.name.split("::")[1]
            ctx.applied(fused, f"residual add of '{path}' fused: {op}")


def find(graph: Graph) -> tuple[Match, ...]:
    """Return every norm whose input is an add, with the reason where it can't be fused."""
    taken: set[Node] = set()
    found = []
    for norm in find_norms(graph):
        add = norm.x
        if add.target is not aten.add.Tensor:
            continue
        reason = "its sum is fused with another norm" if add in taken else _obstacle(norm, add)
        if not reason:
            taken.add(add)
        found.append(Match(norm, add, reason))
    return tuple(found)


def count_sites(function: GraphFunction) -> int:
    """Return the number of fused sites in a graph."""
    return sum(node.target in FUSED for node in function.graph.nodes)


def _obstacle(norm: Norm, add: Node) -> str:
    x, residual = add.args[:2]
    if not isinstance(x, Node) or not isinstance(residual, Node):
        return "the add has a constant term"
    if add.kwargs.get("alpha", 1) != 1:
        return "the add scales its second term"
    if val(x).shape != val(residual).shape:
        return f"the add broadcasts {list(val(residual).shape)} to {list(val(add).shape)}"
    if len({val(n).dtype for n in (x, residual, norm.result)}) > 1:
        return "the add or the norm changes the dtype"
    if norm.dims != 1:
        return f"the norm is over the last {norm.dims} dimensions"
    if any(not _is_early(a) for a in (norm.weight, norm.bias)):
        return "the norm's weight is computed from other values"
    own = {*norm.inside, norm.result}
    if any(user not in own for node in norm.inside for user in node.users):
        return "other code reads the norm's intermediate values"
    return ""


def _is_early(parameter: object) -> bool:
    """Tell whether a norm's parameter is an input of the graph, or one op on inputs."""
    if not isinstance(parameter, Node) or parameter.op == "placeholder":
        return True
    return all(source.op == "placeholder" for source in parameter.all_input_nodes)


def _not_chosen(norm: Node, only: tuple[str, ...]) -> str:
    path = info(norm).path
    chosen = not only or any(Glob(glob).matches(path) for glob in only)
    return "" if chosen else "'fuse { only = ... }' does not name it"


def _fuse(rewriter: Rewriter, match: Match, span: Span | None) -> Node:
    norm, add = match.norm, match.add
    for parameter in (norm.weight, norm.bias):
        if isinstance(parameter, Node) and add < parameter:
            add.prepend(parameter)
    with rewriter.before(add):
        op, args = _call(rewriter, match)
        fused = rewriter.call(op, *args, like=norm.result, span=span)
        y = rewriter.call(operator.getitem, fused, 0, like=norm.result, span=span)
        total = rewriter.call(operator.getitem, fused, 1, like=add, span=span)
    rewriter.replace(norm.result, y)
    add.replace_all_uses_with(total)
    for node in sorted({*norm.inside, add, *add.all_input_nodes}, reverse=True):
        if not node.users:
            rewriter.graph.erase_node(node)
    return fused


def _call(rewriter: Rewriter, match: Match) -> tuple[object, tuple]:
    """Return the fused op of a site and its arguments."""
    norm, (x, residual) = match.norm, match.add.args[:2]
    if norm.kind != LAYER:
        return ours.add_rms_norm.default, (x, residual, norm.weight, norm.eps)
    own = (norm.weight, norm.bias, norm.eps)
    for term, other in ((x, residual), (residual, x)):
        if term.target is dropout and len(term.users) == 1:
            dropped, *place = term.args
            product, bias = _without_bias(rewriter, dropped)
            return bias_dropout_add_layer_norm, (product, bias, other, *own, *place)
    return ours.add_layer_norm.default, (x, residual, *own)


def _without_bias(rewriter: Rewriter, value: Node) -> tuple[Node, Node | None]:
    """Take the bias off the linear layer that alone makes ``value``, if it has one."""
    linear = value.args[0] if value.target is aten.reshape.default else value
    place = _BIASED.get(linear.target)
    if place is None or len(linear.args) != 3 or linear.kwargs or not _feeds_only(linear, value):
        return value, None
    bias = linear.args[place]
    if not isinstance(bias, Node) or val(bias).shape != val(value).shape[-1:]:
        return value, None
    factors = [a for i, a in enumerate(linear.args) if i != place]
    op = aten.mm.default if linear.target is aten.addmm.default else aten.linear.default
    with rewriter.before(linear):
        product = rewriter.call(op, *factors, like=linear)
    rewriter.replace(linear, product)
    return product if value is linear else value, bias


def _feeds_only(linear: Node, value: Node) -> bool:
    """Tell whether a layer's output has one reader, at once or through the reshape ``value``."""
    return len(linear.users) == 1 and len(value.users) == 1
