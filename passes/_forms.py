"""Other forms of operators that can run on local parts; rules name them in ``Choice.instead``."""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import prod

import torch
from torch.fx import Node

from autoshard.ir.node_info import info, val
from autoshard.ir.placement import Placement
from autoshard.ir.rewrite import Rewriter
from autoshard.ir.rules.call import bound_arguments, call_of, tensor_inputs
from autoshard.ir.rules.table import choose
from autoshard.ops.vocab import vocab_embedding
from autoshard.passes import _loss_forms as losses
from autoshard.passes._placing import Reader

aten = torch.ops.aten
Form = Callable[[Rewriter, Node, Reader], list[Node]]


def _add_bias_last(rewriter: Rewriter, node: Node, reader: Reader) -> list[Node]:
    """``linear(x, w, b)`` --> ``add(linear(x, w), b)``: the sum over ranks lies between."""
    if node.target is aten.linear.default:
        x, weight, bias = node.args
        product = rewriter.call(aten.linear.default, x, weight, like=node)
    else:
        bias, x, weight = node.args
        product = rewriter.call(aten.mm.default, x, weight, like=node)
    return [product, rewriter.call(aten.add.Tensor, product, bias, like=node)]


def _sum_then_scale(rewriter: Rewriter, node: Node, reader: Reader) -> list[Node]:
    """``mean(x, d)`` --> ``mul(sum(x, d), 1 / n)`` with n counted in the whole value."""
    (x, *dims), kwargs = node.args, node.kwargs
    op = aten.sum.dim_IntList if dims else aten.sum.default
    total = rewriter.call(op, x, *dims, like=node, **kwargs)
    count = prod(val(x).shape) // prod(val(node).shape)
    return [total, rewriter.call(aten.mul.Tensor, total, 1.0 / count, like=node)]


def _vocab_embedding(rewriter: Rewriter, node: Node, reader: Reader) -> list[Node]:
    """``embedding(w S(0), i)`` --> ``vocab_embedding(w, i)``, a partial sum."""
    given = bound_arguments(node)
    args = (given["weight"], given["indices"], reader.axis, reader.size, given["padding_idx"])
    return [rewriter.call(vocab_embedding, *args, like=node)]


def _in_place(form: Form) -> Form:
    """Return the form that inserts before the node and lets its readers read the last result."""

    def apply(rewriter: Rewriter, node: Node, reader: Reader) -> list[Node]:
        with rewriter.before(node):
            made = form(rewriter, node, reader)
        rewriter.replace(node, made[-1])
        _place_over_batch(rewriter, made)
        return made

    return apply


def _place_over_batch(rewriter: Rewriter, made: list[Node]) -> None:
    """Record how the new values lie over the batch: not as the one they stand for."""
    outs: dict[Node, tuple[Placement, ...]] = {}
    for node in made:
        if node.target is operator.getitem:
            outs[node] = (outs[node.args[0]][node.args[1]],)
        else:
            ins = tuple(info(n).placement("dp") for n in tensor_inputs(node))
            outs[node] = choose(call_of(node, 1, axis="dp"), ins).outs
        rewriter.annotate(node, placements={**info(node).placements, "dp": outs[node][0]})


FORMS: dict[str, Form] = {
    "add_bias_last": _in_place(_add_bias_last),
    "sum_then_scale": _in_place(_sum_then_scale),
    "vocab_embedding": _in_place(_vocab_embedding),
    "vocab_cross_entropy": _in_place(losses.cross_entropy),
    "vocab_logsumexp": _in_place(losses.logsumexp),
    "vocab_softmax": _in_place(losses.softmax),
    "vocab_gather": _in_place(losses.gather),
}
