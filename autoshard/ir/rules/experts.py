"""Grouped matrix products: rows sorted by expert, each group times its expert's matrix.

Which rows an expert gets depends on all rows before them, so rows and experts are whole; the
experts' inner dimensions split as those of any linear layer. The operators are Hugging Face's and
exist once their module is imported, so they are named here, not referred to.
"""

from __future__ import annotations

from autoshard.ir.placement import Placement
from autoshard.ir.rules.call import Call, Choice, Rule
from autoshard.ir.rules.factors import Factors, solve

WHOLE = frozenset({"rows", "expert"})
X, W, ENDS, Y = ("rows", "k"), ("expert", "k", "n"), ("expert",), ("rows", "n")


def _grouped_mm(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``rows k, expert k n, ends -> rows n``."""
    each = (frozenset({0}), frozenset({1}))
    factors = Factors(
        (X, W, ENDS), (Y,), frozenset("k"), whole=WHOLE, linear=each, anchors=frozenset({1})
    )
    return solve(factors, call, ins)


def _grouped_mm_backward(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``x, w, ends, dy -> dx, dw``: a split of n makes dx a partial sum."""
    factors = Factors(
        (X, W, ENDS, Y), (X, W), frozenset("n"), whole=WHOLE, linear=(frozenset({3}),)
    )
    return solve(factors, call, ins)


TABLE: dict[object, Rule] = {
    "transformers.grouped_mm_fallback.default": _grouped_mm,
    "transformers.grouped_mm_fallback_backward.default": _grouped_mm_backward,
}
