"""Terms: what a value is, as one interned expression, so that equal values are one number.

A term is an operator's name, the terms it reads and what else it was given. Two graphs that
compute the same from the same inputs give the same numbers, whatever their nodes are called and in
whatever order they stand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

SUM = "sum of terms"
_SHOWN = 3  # levels of a term that are printed


class Term(NamedTuple):
    """One expression: ``children`` are numbers of other terms."""

    op: str
    children: tuple[int, ...] = ()
    attrs: tuple[object, ...] = ()


@dataclass
class Terms:
    """All terms of a comparison; a term's number is its place in ``made``."""

    made: list[Term] = field(default_factory=list)
    _numbers: dict[Term, int] = field(default_factory=dict)

    def make(self, op: str, children: Iterable[int] = (), *attrs: object) -> int:
        """Return the number of a term, the same for equal ones."""
        term = Term(op, tuple(children), attrs)
        number = self._numbers.get(term)
        if number is None:
            number = self._numbers[term] = len(self.made)
            self.made.append(term)
        return number

    def add(self, *children: int) -> int:
        """Return a sum: flat and sorted, since addition is one operation however it is nested."""
        flat: list[int] = []
        for child in children:
            term = self.made[child]
            flat += term.children if term.op == SUM else (child,)
        return flat[0] if len(flat) == 1 else self.make(SUM, sorted(flat))

    def text(self, number: int, depth: int = _SHOWN) -> str:
        """Return a term as people read it, its deeper parts left out."""
        op, children, attrs = self.made[number]
        name = op.removeprefix("aten.").removesuffix(".default")
        if not children:
            return f"{name} {' '.join(map(str, attrs))}".strip()
        if not depth:
            return f"{name}(...)"
        inner = [self.text(child, depth - 1) for child in children]
        shown = [str(a) for a in attrs if not isinstance(a, tuple)]
        return f"{name}({', '.join([*inner, *shown])})"

    def first_difference(self, a: int, b: int) -> tuple[int, int]:
        """Return the deepest pair of terms, one of each side, that is the reason of a != b."""
        while True:
            x, y = self.made[a], self.made[b]
            pairs = self._unequal(x, y)
            if x.op != y.op or x.attrs != y.attrs or not pairs:
                return a, b
            a, b = pairs[0]

    def _unequal(self, x: Term, y: Term) -> list[tuple[int, int]]:
        if x.op == SUM == y.op:
            left, right = list(x.children), list(y.children)
            for child in x.children:
                if child in right:
                    left.remove(child)
                    right.remove(child)
            return self._alike(left, right)
        if len(x.children) != len(y.children):
            return []
        return [(i, j) for i, j in zip(x.children, y.children, strict=True) if i != j]

    def _alike(self, left: list[int], right: list[int]) -> list[tuple[int, int]]:
        """Pair what only one side of a sum has with what only the other has: one term, or alike.

        Nothing where that does not come out even: then the sum itself is the difference.
        """
        left, right = (sorted(side, key=lambda n: self.made[n].op) for side in (left, right))
        ops = [[self.made[number].op for number in side] for side in (left, right)]
        comes_out = len(left) == len(right) == 1 or ops[0] == ops[1]
        return list(zip(left, right, strict=True)) if comes_out else []
