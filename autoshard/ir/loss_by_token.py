"""A cross entropy as each token's loss over a vocabulary that may be split, and its reduction.

What the compiler puts in the place of torch's operator, and how the proof of erasure reads that.
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

aten = torch.ops.aten
MEAN, SUM = 1, 2  # torch's numbers for `reduction`


def loss_by_token(rewriter: Rewriter, node: Node, axis: str, size: int) -> list[Node]:
    """``cross_entropy_loss(x, t)`` --> ``vocab_cross_entropy(x, t)`` and its reduction.

    Return the new nodes, the last one in the place of the old. Classes of a map ``x[N, C, ...]`` go
    last first; class weights scale the loss of each target.
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
    args = (x, target, axis, size, classes, ignored, smoothing)
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
