"""Loss functions. Means over the batch are made global before placements are asked for."""

from __future__ import annotations

import torch

from autoshard.ir.placement import REPLICATE, Placement, Shard
from autoshard.ir.rules.call import Call, Choice, Rule
from autoshard.ir.rules.factors import Factors, Labels, solve

aten = torch.ops.aten
MEAN, SUM = 1, 2  # torch's numbers for `reduction`


def _cross_entropy(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``nc..., n... -> n...``; split classes need the vocabulary-parallel form.

    ``target`` with class probabilities has the shape of the input.
    """
    rank = len(call.shapes[0])
    at = min(1, rank - 1)
    labels: Labels = tuple("c" if d == at else d for d in range(rank))
    rows = tuple(d for d in labels if d != "c")
    indices = call.shapes[1] != call.shapes[0]
    weight = call.index("weight") is not None
    all_labels = (labels, rows if indices else labels, *((("c",),) if weight else ()))
    out, sums, whole = _reduced(call, rows)
    split = isinstance(ins[0], Shard) and ins[0].dim == at
    if split and indices and not weight and rank == 2:
        return Choice((ins[0], REPLICATE), (REPLICATE,), instead="vocab_cross_entropy")
    return solve(Factors(all_labels, (out,), sums, whole | {"c"}), call, ins)


def _nll(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """As cross entropy, on log probabilities; the classes are whole."""
    rank = len(call.shapes[0])
    at = min(1, rank - 1)
    labels: Labels = tuple("c" if d == at else d for d in range(rank))
    rows = tuple(d for d in labels if d != "c")
    weight = (("c",),) if call.index("weight") is not None else ()
    out, sums, whole = _reduced(call, rows)
    return solve(Factors((labels, rows, *weight), (out,), sums, whole | {"c"}), call, ins)


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
    **dict.fromkeys(
        (
            aten.mse_loss.default,
            aten.l1_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
            aten.binary_cross_entropy.default,
            aten.binary_cross_entropy_with_logits.default,
            aten.kl_div.default,
        ),
        _elementwise,
    ),
}
