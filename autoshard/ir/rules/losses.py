"""Loss functions. Means over the batch are made global before placements are asked for."""

from __future__ import annotations

from dataclasses import replace

import torch

from autoshard.ir.placement import REPLICATE, Placement, Shard
from autoshard.ir.rules.call import Call, Choice, Rule
from autoshard.ir.rules.factors import NONE, Factors, Labels, broadcast, solve

aten = torch.ops.aten
MEAN, SUM = 1, 2  # torch's numbers for `reduction`
GRADIENT = (frozenset({0}),)


def _cross_entropy(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``nc..., n... -> n...``; split classes need the vocabulary-parallel form.

    ``target`` with class probabilities has the shape of the input.
    """
    rank = len(call.shapes[0])
    labels, rows = _class_labels(call, call.shapes[0])
    indices = call.shapes[1] != call.shapes[0]
    weight = call.index("weight") is not None
    all_labels = (labels, rows if indices else labels, *((("c",),) if weight else ()))
    out, sums, whole = _reduced(call, rows)
    split = isinstance(ins[0], Shard) and labels[ins[0].dim] == "c"
    # Weights of classes and smoothing together weigh each column by itself.
    plain = not (weight and call["label_smoothing"])
    if split and indices and rank > 1 and plain:
        wants = (ins[0], *(REPLICATE,) * (len(ins) - 1))
        return Choice(wants, (REPLICATE,), instead="vocab_cross_entropy")
    return solve(Factors(all_labels, (out,), sums, whole | {"c"}), call, ins)


def _class_labels(call: Call, shape: tuple[int, ...]) -> tuple[Labels, Labels]:
    """Return the labels of log probabilities ``nc...`` and of the rows without classes."""
    at = min(1, len(shape) - 1)
    labels: Labels = tuple("c" if d == at else d for d in range(len(shape)))
    return labels, tuple(d for d in labels if d != "c")


def _nll(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """As cross entropy, on log probabilities; the classes are whole."""
    labels, rows = _class_labels(call, call.shapes[0])
    weight = (("c",),) if call.index("weight") is not None else ()
    out, sums, whole = _reduced(call, rows)
    # The lowered form also gives what it would divide a mean by: a sum over the rows.
    outs = (out, ())[: len(call.outs)]
    if len(outs) == 2 and call["reduction"] not in (MEAN, SUM):
        whole |= frozenset(rows)
    return solve(Factors((labels, rows, *weight), outs, sums, whole | {"c"}), call, ins)


def _nll_backward(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``dloss, x nc, target n, c, total -> nc``; the classes are whole.

    Only a mean reads ``total_weight``; for a sum it may lie as it likes.
    """
    labels, rows = _class_labels(call, call.shapes[1])
    grad = rows if call.shapes[0] else ()
    weight = (("c",),) if call.index("weight") is not None else ()
    unread = call["reduction"] != MEAN
    factors = Factors(
        (grad, labels, rows, *weight, ()), (labels,), whole=frozenset("c"), linear=GRADIENT
    )
    held = (*ins[:-1], REPLICATE) if unread else ins
    choice = solve(factors, call, held)
    return replace(choice, wants=(*choice.wants[:-1], ins[-1])) if unread else choice


def _elementwise_backward(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """The gradient of a loss between values of one shape; a mean counts its elements."""
    labels = broadcast(call.shapes, call.outs[0])
    out = tuple(range(len(call.outs[0])))
    whole = frozenset(out) if call["reduction"] == MEAN else NONE
    return solve(Factors(labels, (out,), whole=whole, linear=GRADIENT), call, ins)


def _similarity(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``..d, ..d -> ..``: the dim of the scalar product is whole."""
    full = torch.broadcast_shapes(*call.shapes)
    dim = call["dim"] % len(full)
    given = broadcast(call.shapes, full)
    out = tuple(d for d in range(len(full)) if d != dim)
    return solve(Factors(given, (out,), whole=frozenset({dim})), call, ins)


def _pairs(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``nd, nd, n -> n``: pairs are independent."""
    rows: Labels = ("n",) if len(call.shapes[0]) > 1 else ()
    out, sums, whole = _reduced(call, rows)
    given = ((*rows, "d"), (*rows, "d"), rows)
    return solve(Factors(given, (out,), sums, whole | {"d"}), call, ins)


def _elementwise(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """A loss between two values of one shape."""
    labels = tuple(range(len(call.shapes[0])))
    full = tuple(labels[len(labels) - len(s) :] for s in call.shapes)
    out, sums, whole = _reduced(call, labels)
    return solve(Factors(full, (out,), sums, whole), call, ins)


def _reduced(call: Call, rows: Labels) -> tuple[Labels, frozenset, frozenset]:
    """Return output labels, summed and whole labels for the call's ``reduction``."""
    reduction = call["reduction"]
    if reduction == SUM:
        return (), frozenset(rows), frozenset()
    if reduction == MEAN:
        return (), frozenset(), frozenset(rows)
    return rows, frozenset(), frozenset()


TABLE: dict[object, Rule] = {
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.nll_loss_nd.default: _nll,
    aten.nll_loss.default: _nll,
    aten.nll_loss_forward.default: _nll,
    aten.nll_loss2d_forward.default: _nll,
    aten.nll_loss_backward.default: _nll_backward,
    aten.nll_loss2d_backward.default: _nll_backward,
    aten.cosine_similarity.default: _similarity,
    aten.cosine_embedding_loss.default: _pairs,
    **dict.fromkeys(
        (
            aten.mse_loss.default,
            aten.l1_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
            aten.binary_cross_entropy.default,
            aten.binary_cross_entropy_with_logits.default,
            aten.kl_div.default,
            aten.margin_ranking_loss.default,
        ),
        _elementwise,
    ),
    **dict.fromkeys(
        (
            aten.mse_loss_backward.default,
            aten.smooth_l1_loss_backward.default,
            aten.huber_loss_backward.default,
            aten.binary_cross_entropy_backward.default,
        ),
        _elementwise_backward,
    ),
}
