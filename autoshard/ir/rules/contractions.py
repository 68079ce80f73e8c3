"""Matrix products: the contracted dimension gives a partial sum, all others stay split.

A row-parallel product with a bias is first taken apart (``instead``): a bias inside it would be
added once per rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autoshard.ir.placement import PARTIAL, Placement
from autoshard.ir.rules.call import Call, Choice, Rule
from autoshard.ir.rules.factors import Factors, Labels, broadcast, solve

aten = torch.ops.aten
SUMS = frozenset("k")
EACH = (frozenset({0}), frozenset({1}))  # linear in either operand


def _linear(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``...k, nk, n -> ...n``; the weight's placement is the plan's and rules."""
    rows = tuple(range(len(call.shapes[0]) - 1))
    ends: Labels = ("n",) if len(call.shapes[1]) == 2 else ()
    labels: tuple[Labels, ...] = ((*rows, "k"), (*ends, "k"))
    bias = call.index("bias") is not None
    if bias:
        labels = (*labels, ends)
    factors = Factors(
        labels, ((*rows, *ends),), SUMS, linear=() if bias else EACH, anchors=frozenset({1})
    )
    return _bias_last(solve(factors, call, ins), bias)


def _addmm(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``mn, mk, kn -> mn``, the first broadcast; Hugging Face's Conv1D is this."""
    bias = _rename(broadcast(call.shapes[:1], call.outs[0])[0], ("m", "n"))
    labels = (bias, ("m", "k"), ("k", "n"))
    factors = Factors(labels, (("m", "n"),), SUMS, anchors=frozenset({2}))
    return _bias_last(solve(factors, call, ins), True)


def _mm(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``mk, kn -> mn``."""
    labels = (("m", "k"), ("k", "n"))
    return solve(Factors(labels, (("m", "n"),), SUMS, linear=EACH), call, ins)


def _bmm(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``bmk, bkn -> bmn``."""
    labels = (("b", "m", "k"), ("b", "k", "n"))
    return solve(Factors(labels, (("b", "m", "n"),), SUMS, linear=EACH), call, ins)


def _baddbmm(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``bmn, bmk, bkn -> bmn``, the first broadcast; a sum over ranks would repeat it."""
    added = _rename(broadcast(call.shapes[:1], call.outs[0])[0], ("b", "m", "n"))
    labels = (added, ("b", "m", "k"), ("b", "k", "n"))
    return solve(Factors(labels, (("b", "m", "n"),), whole=SUMS), call, ins)


def _matmul(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``...mk, ...kn -> ...mn`` with broadcast batch dimensions and vectors as torch has them."""
    a, b = call.shapes
    rows: Labels = ("m",) if len(a) > 1 else ()
    columns: Labels = ("n",) if len(b) > 1 else ()
    batch = call.outs[0][: len(call.outs[0]) - len(rows) - len(columns)]
    batch_a, batch_b = broadcast((a[:-2], b[:-2]), batch)
    labels = ((*batch_a, *rows, "k"), (*batch_b, "k", *columns))
    out = (*range(len(batch)), *rows, *columns)
    return solve(Factors(labels, (out,), SUMS, linear=EACH), call, ins)


def _bias_last(choice: Choice, bias: bool) -> Choice:
    return replace(choice, instead="add_bias_last") if bias and PARTIAL in choice.outs else choice


def _rename(labels: Labels, names: Labels) -> Labels:
    return tuple(None if label is None else names[label] for label in labels)


TABLE: dict[object, Rule] = {
    aten.linear.default: _linear,
    aten.addmm.default: _addmm,
    aten.mm.default: _mm,
    aten.mv.default: _matmul,
    aten.dot.default: _matmul,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
    aten.matmul.default: _matmul,
}
