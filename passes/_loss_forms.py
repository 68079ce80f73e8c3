"""Losses over a split vocabulary: what stands in the place of operators that need all logits.

Each form gives the new nodes in order, the last one in the place of the old. Used by ``_forms``.
"""

from __future__ import annotations

import operator
from functools import partial

import torch
from torch.fx import Node

from autoshard.ir.node_info import val
from autoshard.ir.rewrite import Rewriter
from autoshard.ir.rules.call import bound_arguments
from autoshard.ops.vocab import vocab_cross_entropy
from autoshard.ops.vocab_logits import vocab_gather, vocab_logsumexp
from autoshard.passes._placing import Reader

aten = torch.ops.aten
MEAN, SUM = 1, 2  # torch's numbers for `reduction`
SOFTMAX = (aten.softmax.int, aten._softmax.default)


def cross_entropy(rewriter: Rewriter, node: Node, reader: Reader) -> list[Node]:
    """``cross_entropy_loss(x S(1), t)`` --> ``vocab_cross_entropy(x, t)`` and its reduction.

    Classes of a map ``x[N, C, ...]`` go last first; class weights scale the loss of each target.
    """
    given = bound_arguments(node)
    call = partial(rewriter.call, like=node)
    x, target, ignored = given["self"], given["target"], given["ignore_index"]
    made: list[Node] = []
    rank, classes = val(x).dim(), val(x).shape[1]
    if rank > 2:
        x = call(aten.permute.default, x, [0, *range(2, rank), 1])
        made.append(x)
    smoothing = given["label_smoothing"]
    args = (x, target, reader.axis, reader.size, classes, ignored, smoothing)
    both = call(vocab_cross_entropy, *args)
    loss, weights = call(operator.getitem, both, 0), None
    made += [both, loss]
    if given["weight"] is not None:
        made += _weights_of(call, given["weight"], target, ignored)
        weights = made[-1]
        made.append(call(aten.mul.Tensor, loss, weights))
    return made + _reduced(call, given["reduction"], made[-1], target, ignored, weights)


def _weights_of(call: partial, weight: Node, target: Node, ignored: int) -> list[Node]:
    """Return the weight of each target's class, 0 for what is ignored."""
    hidden = call(aten.eq.Scalar, target, ignored)
    safe = call(aten.masked_fill.Scalar, target, hidden, 0)
    found = call(aten.index.Tensor, weight, [safe])
    return [hidden, safe, found, call(aten.masked_fill.Scalar, found, hidden, 0)]


def _reduced(
    call: partial, reduction: int, loss: Node, target: Node, ignored: int, weights: Node | None
) -> list[Node]:
    """Return the sum, or the mean over the targets that count, of a loss per target."""
    if reduction not in (MEAN, SUM):
        return []
    total = call(aten.sum.default, loss)
    if reduction == SUM:
        return [total]
    valid = [] if weights is not None else [call(aten.ne.Scalar, target, ignored)]
    count = call(aten.sum.default, valid[0] if valid else weights)
    return [total, *valid, count, call(aten.div.Tensor, total, count)]


def logsumexp(rewriter: Rewriter, node: Node, reader: Reader) -> list[Node]:
    """``logsumexp(x S(-1), [-1])`` --> ``vocab_logsumexp(x)``."""
    x, call = node.args[0], partial(rewriter.call, like=node)
    made = [_logsumexp(call, x, reader)]
    if bound_arguments(node)["keepdim"]:
        made.append(call(aten.unsqueeze.default, made[-1], val(x).dim() - 1))
    return made + _cast(call, made[-1], val(node).dtype)


def softmax(rewriter: Rewriter, node: Node, reader: Reader) -> list[Node]:
    """``log_softmax(x S(-1), -1)`` --> ``sub(x, vocab_logsumexp(x))``; a softmax its ``exp``."""
    x, call = node.args[0], partial(rewriter.call, like=node)
    made: list[Node] = []
    if val(node).dtype.itemsize > val(x).dtype.itemsize:
        made = _cast(call, x, val(node).dtype)
        x = made[-1]
    lse = _logsumexp(call, x, reader)
    wide = call(aten.unsqueeze.default, lse, val(x).dim() - 1)
    made += [lse, wide, call(aten.sub.Tensor, x, wide)]
    if node.target in SOFTMAX:
        made.append(call(aten.exp.default, made[-1]))
    return made + _cast(call, made[-1], val(node).dtype)


def gather(rewriter: Rewriter, node: Node, reader: Reader) -> list[Node]:
    """``gather(x S(-1), -1, i)`` --> ``vocab_gather(x, i)``, a partial sum."""
    given = bound_arguments(node)
    args = (given["self"], given["index"], reader.axis, reader.size)
    return [rewriter.call(vocab_gather, *args, like=node)]


def _logsumexp(call: partial, x: Node, reader: Reader) -> Node:
    return call(vocab_logsumexp, x, reader.axis, reader.size, val(x).shape[-1])


def _cast(call: partial, value: Node, dtype: torch.dtype) -> list[Node]:
    return [] if val(value).dtype == dtype else [call(aten._to_copy.default, value, dtype=dtype)]
