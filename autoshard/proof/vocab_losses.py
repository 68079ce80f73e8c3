"""Readings of softmax, cross entropy and what else losses do with logits, split or whole.

A log-softmax is logits minus their logsumexp, so that what runs over a split vocabulary and what
torch computes of whole logits have one spelling; its negative log likelihood is a cross entropy.
With L = log_sum_exp(x) over the real columns:

    log_softmax(x) = x - L          its backward: g + dL(sum(-g))
    softmax(x) = exp(x - L)         its backward: that of y = log_softmax, with g exp(y)
    dL(g) = g exp(x - L)
"""

from __future__ import annotations

from math import prod

import torch
from torch.fx import Node

from autoshard.ir.node_info import val
from autoshard.ir.rules.call import Shape, bound_arguments
from autoshard.ops import vocab, vocab_logits
from autoshard.proof.pieces import ZEROS
from autoshard.proof.reader import Reader, Reading, Value, reduction
from autoshard.proof.readings import expanded, product

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for `reduction`


# Softmax, logsumexp, gather ------------------------------------------------------------------
def _log_softmax(reader: Reader, node: Node) -> Value:
    x, shape = node.args[0], reader.shape(node.args[0])
    if shape is None or not _is_over_last(node):
        return None
    return _log_chance(reader, reader.env[x], shape[-1])


def _softmax(reader: Reader, node: Node) -> Value:
    y = _log_softmax(reader, node)
    return None if y is None else reader.call(aten.exp.default, y)


def _log_chance(reader: Reader, x: int, classes: int) -> int:
    return reader.call(aten.sub.Tensor, x, _log_sum_exp(reader, x, classes))


def _log_sum_exp(reader: Reader, x: int, classes: int) -> int:
    return reader.terms.make("log_sum_exp", (x,), classes)


def _log_softmax_backward(reader: Reader, node: Node) -> Value:
    grad, y, *_ = node.args
    inner = reader.terms.made[reader.env[grad]]
    if inner.op == "nll_backward":
        return reader.terms.make("cross_entropy_backward", inner.children, *inner.attrs)
    return _through_log_chance(reader, reader.env[grad], reader.env[y], node)


def _softmax_backward(reader: Reader, node: Node) -> Value:
    grad, y, *_ = node.args
    log_chance = reader.terms.made[reader.env[y]]
    if log_chance.op != str(aten.exp.default):
        return None
    through = product(reader, reader.env[grad], reader.env[y])
    return _through_log_chance(reader, through, log_chance.children[0], node)


def _through_log_chance(reader: Reader, grad: int, y: int, node: Node) -> int | None:
    """Return the gradient of x where that of ``y = x - log_sum_exp(x)`` is ``grad``."""
    split, shape = _logits(reader, y), reader.shape(node)
    if split is None or shape is None or not _is_over_last(node):
        return None
    minus = reader.call(aten.neg.default, grad)
    total = reduction(reader.terms, "sum", minus, shape, (len(shape) - 1,))
    return reader.terms.add(grad, _log_sum_exp_slope(reader, total, *split))


def _log_sum_exp_slope(reader: Reader, grad: int, x: int, classes: int) -> int:
    chance = reader.call(aten.exp.default, _log_chance(reader, x, classes))
    return product(reader, grad, chance)


def _is_over_last(node: Node) -> bool:
    dim = bound_arguments(node)["dim"]
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    rank = val(node.args[0]).dim()
    return [d % rank for d in dims] == [rank - 1]


def _logits(reader: Reader, y: int) -> tuple[int, int] | None:
    """Return the logits' term and number of classes behind a log-softmax."""
    term = reader.terms.made[y]
    if term.op != str(aten.sub.Tensor) or len(term.children) != 2:
        return None
    x, total = term.children
    found = reader.terms.made[total]
    return (x, found.attrs[0]) if found.op == "log_sum_exp" and found.children == (x,) else None


def _whole_log_sum_exp(reader: Reader, node: Node) -> Value:
    x, shape = node.args[0], reader.shape(node.args[0])
    if shape is None or not _is_over_last(node):
        return None
    return _log_sum_exp(reader, reader.env[x], shape[-1])


def _split_log_sum_exp(reader: Reader, node: Node) -> Value:
    reader.used.add("logsumexp over a split vocabulary")
    return _log_sum_exp(reader, reader.env[node.args[0]], node.args[3])


def _split_log_sum_exp_backward(reader: Reader, node: Node) -> Value:
    grad, x, total, *_, classes = node.args
    if reader.env[total] != _log_sum_exp(reader, reader.env[x], classes):
        return None  # not the one of these logits
    return _log_sum_exp_slope(reader, reader.env[grad], reader.env[x], classes)


def _gather(reader: Reader, node: Node) -> Value:
    """A gather along the last dim, of whole values or of a split vocabulary."""
    x = node.args[0]
    if node.target is vocab_logits.vocab_gather:
        reader.used.add("gather over a split vocabulary")
        index = node.args[1]
    elif _is_over_last(node):
        index = node.args[2]
    else:
        return None
    return reader.terms.make("gather", (reader.env[x], reader.env[index]), reader.shape(node))


def _split_gather_backward(reader: Reader, node: Node) -> Value:
    grad, index = (reader.env[n] for n in node.args[:2])
    return reader.terms.make("gather_backward", (grad, index), reader.shape(node))


def _scatter_add(reader: Reader, node: Node) -> Value:
    """What torch's backward of a gather is: adding to zeros along the last dim."""
    zeros, _, index, grad = node.args
    if reader.terms.made[reader.env[zeros]].op not in ZEROS or not _is_over_last(node):
        return None
    children = reader.env[grad], reader.env[index]
    return reader.terms.make("gather_backward", children, reader.shape(node))


# Cross entropy -------------------------------------------------------------------------------
def _cross_entropy(
    reader: Reader, logits: int, target: int, ignored: int, classes: int, smoothing: float = 0.0
) -> int:
    """Return the loss of each token; ``classes`` are the real columns of the logits."""
    return reader.terms.make("cross_entropy", (logits, target), ignored, classes, smoothing)


def _nll(reader: Reader, node: Node) -> Value:
    """``nll_loss_forward(log_softmax(x, 1), t)`` is a cross entropy and its reduction."""
    x, target, weight, reduce, ignored = node.args
    logits = _logits(reader, reader.env[x])
    if logits is None or weight is not None:
        return None
    (inner, classes), t = logits, reader.env[target]
    loss = _cross_entropy(reader, inner, t, ignored, classes)
    if reduce == NONE:
        return loss, reader.terms.make("unused", (loss,))
    shape = reader.shape(target)
    total = reduction(reader.terms, "sum", loss, shape, range(len(shape)))
    count = _valid(reader, t, ignored, shape)
    if reduce == MEAN:
        total = reader.call(aten.div.Tensor, total, count)
    return total, count


def _nll_backward(reader: Reader, node: Node) -> Value:
    """Keep what ``_log_softmax_backward_data`` needs to become the gradient of a cross entropy."""
    grad, x, target, weight, reduce, ignored, count = node.args
    logits = _logits(reader, reader.env[x])
    if logits is None or weight is not None:
        return None
    shape, g, t = reader.shape(target), reader.env[grad], reader.env[target]
    if reduce == MEAN:
        g = reader.call(aten.div.Tensor, g, reader.env[count])
    if reduce != NONE and prod(shape) != 1:
        g = expanded(reader, g, (), shape)
    return reader.terms.make("nll_backward", (g, logits[0], t), ignored, logits[1], 0.0)


def _valid(reader: Reader, target: int, ignored: int, shape: Shape) -> int:
    valid = reader.call(aten.ne.Scalar, target, ignored)
    return reduction(reader.terms, "sum", valid, shape, range(len(shape)))


def _split_cross_entropy(reader: Reader, node: Node) -> Value:
    reader.used.add("cross entropy over a split vocabulary")
    given = bound_arguments(node)
    classes, rest = given["classes"], (given["ignore_index"], given["classes"])
    x, target = reader.env[given["logits"]], reader.env[given["target"]]
    loss = _cross_entropy(reader, x, target, *rest, given["label_smoothing"])
    return loss, _log_sum_exp(reader, x, classes)


def _split_cross_entropy_backward(reader: Reader, node: Node) -> Value:
    given = bound_arguments(node)
    names = ("grad", "logits", "target", "lse")
    grad, x, target, total = (reader.env[given[name]] for name in names)
    children = [grad, x, target]
    if total != _log_sum_exp(reader, x, given["classes"]):
        children.append(total)  # not the one of these logits
    attrs = given["ignore_index"], given["classes"], given["label_smoothing"]
    return reader.terms.make("cross_entropy_backward", children, *attrs)


TABLE: dict[object, Reading] = {
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten._softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten.logsumexp.default: _whole_log_sum_exp,
    vocab_logits.vocab_logsumexp: _split_log_sum_exp,
    vocab_logits.vocab_logsumexp_backward: _split_log_sum_exp_backward,
    aten.gather.default: _gather,
    vocab_logits.vocab_gather: _gather,
    vocab_logits.vocab_gather_backward: _split_gather_backward,
    aten.scatter_add.default: _scatter_add,
    aten.nll_loss_forward.default: _nll,
    aten.nll_loss_backward.default: _nll_backward,
    vocab.vocab_cross_entropy: _split_cross_entropy,
    vocab.vocab_cross_entropy_backward: _split_cross_entropy_backward,
}
