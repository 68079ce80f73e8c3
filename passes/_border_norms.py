"""Take a fused residual add + norm apart where a stage begins with it.

The fused op reads two values of the stage before; taken apart, only their sum crosses.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import Node

from autoshard.ir.buckets import cast
from autoshard.ir.graph_function import GraphFunction
from autoshard.ir.node_info import info
from autoshard.ir.precision import HALVES
from autoshard.ir.rewrite import Rewriter
from autoshard.ops import add_layer_norm as _layer_norm  # noqa: F401  (registers the op)
from autoshard.ops import add_rms_norm as _rms_norm  # noqa: F401
from autoshard.ops.bias_dropout_add_layer_norm import bias_dropout_add_layer_norm
from autoshard.ops.dropout import dropout

aten = torch.ops.aten
ours = torch.ops.autoshard

# Fused op -> the plain norm; their arguments after the two addends are the same.
_NORMS = {
    ours.add_layer_norm.default: aten.layer_norm.default,
    ours.add_rms_norm.default: aten.rms_norm.default,
    bias_dropout_add_layer_norm: aten.layer_norm.default,
}


def take_apart_at_borders(
    function: GraphFunction, is_border: Callable[[Node], bool], pass_name: str
) -> tuple[Node, ...]:
    """Take apart every fused norm whose addends both cross a border; return the new norms."""
    rewriter = Rewriter(function, pass_name)
    fused = [n for n in function.graph.nodes if n.target in _NORMS and is_border(n)]
    return tuple(norm for node in fused if (norm := _take_apart(rewriter, node)) is not None)


def _take_apart(rewriter: Rewriter, node: Node) -> Node | None:
    """Replace one fused norm by an add beside its addends and a norm; None if it can't be."""
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if len(items) < len(node.users) or not set(items) <= {0, 1}:
        return None
    x, residual = addends(node)
    last = max((x, residual), key=list(rewriter.graph.nodes).index)
    # The user's own add gives its path; the sum must not count as part of the norm's module.
    own_add = 1 in items and info(items[1]).path != info(node).path
    like = items[1] if own_add else last
    placements = info(residual).placements  # both results lie as both addends do
    with rewriter.after(last):
        x = _dropped(rewriter, node, like=like)
        total = rewriter.call(aten.add.Tensor, x, residual, like=like, placements=placements)
    with rewriter.before(node):
        norm = _plain_norm(rewriter, node, total)
    for index, new in ((0, norm), (1, total)):
        if index in items:
            rewriter.replace(items[index], new)
    rewriter.graph.erase_node(node)
    return norm


def addends(node: Node) -> tuple[Node, Node]:
    """Return the two values that a fused norm adds (the first before its bias and dropout)."""
    return node.args[0], node.args[2 if node.target is bias_dropout_add_layer_norm else 1]


def _parameters(node: Node) -> tuple:
    """Return weight, bias and eps, or weight and eps, of a fused norm."""
    return node.args[3:6] if node.target is bias_dropout_add_layer_norm else node.args[2:]


def _dropped(rewriter: Rewriter, node: Node, like: Node) -> Node:
    """Return the first addend, with its bias and dropout spelled out."""
    if node.target is not bias_dropout_add_layer_norm:
        return node.args[0]
    x, bias, _, _, _, _, *place = node.args
    if bias is not None:
        x = rewriter.call(aten.add.Tensor, x, bias, like=like)
    return rewriter.call(dropout, x, *place, like=like)


def _plain_norm(rewriter: Rewriter, node: Node, total: Node) -> Node:
    """Return the norm of ``total``, with statistics in float32 as the fused op has them."""
    dtype, rest = total.meta["val"].dtype, _parameters(node)
    if dtype in HALVES:
        total, *rest = [
            cast(rewriter, item, torch.float32, like=node) if isinstance(item, Node) else item
            for item in (total, *rest)
        ]
    width = [total.meta["val"].shape[-1]]
    placements = info(node).placements
    args = (total, width, *rest)
    norm = rewriter.call(_NORMS[node.target], *args, like=node, placements=placements)
    return cast(rewriter, norm, dtype, like=node)
