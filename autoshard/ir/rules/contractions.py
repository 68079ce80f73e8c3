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


def _einsum(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Read the labels from the equation; what it doesn't keep is summed."""
    given, out = _equation(call["equation"], [len(s) for s in call.shapes])
    whole = frozenset(label for labels in given for label in labels if labels.count(label) > 1)
    longest = {
        label: max(n for ls, s in zip(given, call.shapes, strict=True)
                   for other, n in zip(ls, s, strict=True) if other == label)
        for labels in given for label in labels
    }  # fmt: skip
    labels = tuple(
        tuple(None if n == 1 != longest[label] else label for label, n in zip(ls, s, strict=True))
        for ls, s in zip(given, call.shapes, strict=True)
    )
    sums = frozenset(longest) - set(out) - whole
    each = tuple(frozenset({i}) for i in range(len(ins)))
    return solve(Factors(labels, (out,), sums, whole, linear=each), call, ins)


def _equation(text: str, ranks: list[int]) -> tuple[list[Labels], Labels]:
    """Return the labels of an einsum's inputs and output; ``...`` stands for numbered dims."""
    before, arrow, after = text.replace(" ", "").partition("->")
    terms = before.split(",")
    lead = max(rank - len(term.replace("...", "")) for rank, term in zip(ranks, terms, strict=True))

    def spread(term: str, count: int) -> Labels:
        first, dots, rest = term.partition("...")
        return (*first, *range(lead - count, lead), *rest) if dots else tuple(term)

    given = [
        spread(term, rank - len(term.replace("...", "")))
        for term, rank in zip(terms, ranks, strict=True)
    ]
    if arrow:
        return given, spread(after, lead)
    once = sorted(c for c in set(before) - set(",.") if before.count(c) == 1)
    return given, (*range(lead), *once)


def _tensordot(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Pair the named dims of both; all others stay."""
    a, b = (list(range(len(s))) for s in call.shapes)
    left = [d % len(a) for d in call["dims_self"]]
    right = [d % len(b) for d in call["dims_other"]]
    first = tuple(("k", left.index(d)) if d in left else ("a", d) for d in a)
    second = tuple(("k", right.index(d)) if d in right else ("b", d) for d in b)
    sums = frozenset(("k", i) for i in range(len(left)))
    out = tuple(label for label in (*first, *second) if label not in sums)
    return solve(Factors((first, second), (out,), sums, linear=EACH), call, ins)


def _distance(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``..pm, ..rm -> ..pr``, which is not linear."""
    batch = call.outs[0][:-2]
    lead_a, lead_b = broadcast((call.shapes[0][:-2], call.shapes[1][:-2]), batch)
    labels = ((*lead_a, "p", "m"), (*lead_b, "r", "m"))
    out = (*range(len(batch)), "p", "r")
    return solve(Factors(labels, (out,), whole=frozenset("m")), call, ins)


def _distance_backward(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``..pr, ..pm, ..rm, ..pr -> ..pm``: the columns are summed."""
    lead = tuple(range(len(call.outs[0]) - 2))
    pairs, points = (*lead, "p", "r"), (*lead, "p", "m")
    labels = (pairs, points, (*lead, "r", "m"), pairs)
    sums, whole = frozenset("r"), frozenset("m")
    return solve(Factors(labels, (points,), sums, whole, linear=EACH[:1]), call, ins)


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
    aten.einsum.default: _einsum,
    aten.tensordot.default: _tensordot,
    aten.cdist.default: _distance,
    aten._cdist_forward.default: _distance,
    aten._cdist_backward.default: _distance_backward,
}
