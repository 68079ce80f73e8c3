"""Writes at computed places: the dimension that is written into is whole.

All of them are jointly linear in what is written into and what is written. Where parts are added to
zeros, rows that the ranks share out add up: the backward of a look-up is a partial sum.
"""

from __future__ import annotations

import torch

from autoshard.ir.placement import Placement
from autoshard.ir.rules.call import Call, Choice, Rule
from autoshard.ir.rules.factors import NONE, Factors, Labels, broadcast, solve
from autoshard.ir.rules.indexing import Lookup

aten = torch.ops.aten


def _index_put(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``x[i, j] = values``: dims that no index names may be split, in x and in the values."""
    look = Lookup.of(call)
    last = len(call.shapes) - 1
    (values,) = broadcast(call.shapes[last:], _written(call, look))
    given = tuple(None if d is None else look.out[d] for d in values)
    labels = (look.own, *look.read, given)
    adds = bool(call.arguments.get("accumulate"))
    return _solve(call, ins, labels, look.own, whole=look.whole, adds=adds, source=last)


def _written(call: Call, look: Lookup) -> tuple[int, ...]:
    """Return the shape of ``x[i, j]``."""
    own = dict(zip(look.own, call.shapes[0], strict=True))
    extents = {}
    for labels, shape in zip(look.read, call.shapes[1:-1], strict=True):
        extents |= {label: n for label, n in zip(labels, shape, strict=True) if label is not None}
    return tuple(extents.get(label, own.get(label, 1)) for label in look.out)


def _scatter(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``x[..., index[..., e]] = src[..., e]`` along one dim, the others in step."""
    dim, extents = call.dim(), call.shapes
    labels = tuple(_beside(call, place, dim) for place in range(len(extents)))
    own = labels[0]
    adds = call.op is aten.scatter_add.default
    source = len(extents) - 1
    return _solve(call, ins, labels, own, whole=_whole(labels), adds=adds, source=source)


def _whole(labels: tuple[Labels, ...]) -> frozenset:
    """Return what a scatter can't split; a source that is read in part is read from its start."""
    loose = {label for group in labels for label in group if isinstance(label, tuple)}
    return frozenset({"d", *loose, *("e" for _ in loose)})


def _beside(call: Call, place: int, dim: int) -> Labels:
    """Return the labels of one input; dims that are not equally long everywhere stay apart."""
    shape, whole = call.shapes[place], zip(*call.shapes, strict=True)
    equal = [len(set(extents)) == 1 for extents in whole]
    along = "e" if place else "d"
    # A source may be longer than its index: the rest is not read.
    fits = call.shapes[-1][dim] == call.shapes[1][dim]
    split = along if place == 0 or fits else ("cut", place, dim)
    return tuple(
        split if d == dim else (d if equal[d] else ("cut", place, d)) for d in range(len(shape))
    )


def _index_add(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``x[..., index[e]] += source[..., e]`` along one dim."""
    rank, dim = len(call.shapes[0]), call.dim()
    own = tuple("d" if d == dim else d for d in range(rank))
    source = tuple("e" if d == dim else d for d in range(rank))
    adds = call.op is aten.index_add.default
    labels = (own, ("e",), source)
    return _solve(call, ins, labels, own, whole={"d"}, adds=adds, source=2)


def _solve(
    call: Call,
    ins: tuple[Placement, ...],
    labels: tuple[Labels, ...],
    own: Labels,
    *,
    whole: frozenset | set,
    adds: bool,
    source: int,
) -> Choice:
    """Solve a write of input ``source`` into input 0; what is added to zeros may be split."""
    to_zeros = adds and 0 in call.zeros
    written = {label for group in labels[1:] for label in group if label is not None} - set(own)
    joint = frozenset({0, source}) if source > 0 else frozenset({0})
    linear = (joint, frozenset({source})) if to_zeros else (joint,)
    sums = frozenset(written) if to_zeros else NONE
    kept = frozenset(whole) | (NONE if to_zeros else frozenset(written))
    return solve(Factors(labels, (own,), sums=sums - kept, whole=kept, linear=linear), call, ins)


def _scatter_value(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``x[..., index[..., e]] = number``: not linear, else as above."""
    dim = call.dim()
    labels = tuple(_beside(call, place, dim) for place in range(2))
    whole = _whole(labels) | {"e"}
    return solve(Factors(labels, (labels[0],), whole=whole), call, ins)


def _masked_scatter(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """The n-th true place gets the n-th element: every rank must count from the first."""
    labels = tuple(tuple((i, d) for d in range(len(s))) for i, s in enumerate(call.shapes))
    outs = tuple(tuple(("out", d) for d in range(len(s))) for s in call.outs)
    whole = frozenset(label for group in (*labels, *outs) for label in group)
    return solve(Factors(labels, outs, whole=whole), call, ins)


TABLE: dict[object, Rule] = {
    aten.index_put.default: _index_put,
    aten.scatter.src: _scatter,
    aten.scatter_add.default: _scatter,
    aten.scatter.value: _scatter_value,
    aten.index_add.default: _index_add,
    aten.index_copy.default: _index_add,
    aten.masked_scatter.default: _masked_scatter,
    aten.masked_scatter_backward.default: _masked_scatter,
}
