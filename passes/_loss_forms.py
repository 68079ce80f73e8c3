"""Losses over a split vocabulary: what stands in the place of operators that need all logits.

Each form gives the new nodes in order, the last one in the place of the old. Used by ``_forms``.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.fx import Node

from autoshard.ir.loss_by_token import loss_by_token
from autoshard.ir.node_info import val
from autoshard.ir.rewrite import Rewriter
from autoshard.ir.rules.call import bound_arguments
from autoshard.ops.vocab_logits import vocab_gather, vocab_logsumexp
from autoshard.passes._placing import Reader

aten = torch.ops.aten
SOFTMAX = (aten.softmax.int, aten._softmax.default)


def cross_entropy(rewriter: Rewriter, node: Node, reader: Reader) -> list[Node]:
    """``cross_entropy_loss(x S(1), t)`` --> ``vocab_cross_entropy(x, t)`` and its reduction."""
    return loss_by_token(rewriter, node, reader.axis, reader.size)


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
