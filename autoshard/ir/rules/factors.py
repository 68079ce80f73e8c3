"""Rules as factors: an operator is the names of its dimensions, and one solver does the rest.

Every dimension of every input and output carries a label. Dimensions with one label are indexed
together, so a shard along it is a shard of all of them:

    linear      ...k, nk, n -> ...n     k is summed
    softmax     ...d -> ...d            d is whole (each element needs all of it)

Sharding a label that the output has gives a shard; sharding a summed one gives a partial sum. A
dimension of size 1 that is broadcast has the label None. The idea is that of Shardy's and GSPMD's
operator sharding rules.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from autoshard.ir.placement import (
    PARTIAL,
    REPLICATE,
    Partial,
    Placement,
    Replicate,
    Shard,
    normalize,
)
from autoshard.ir.rules.call import Call, Choice

Label = Hashable | None
Labels = tuple[Label, ...]
NONE: frozenset = frozenset()


@dataclass(frozen=True)
class Factors:
    """The dimension labels of one call.

    ``linear`` lists the sets of inputs in which the operator is jointly linear, the others held
    fixed: partial sums may pass through exactly those. ``anchors`` are inputs that are never
    gathered in favour of another one (weights: the plan placed them).
    """

    ins: tuple[Labels, ...]
    outs: tuple[Labels, ...]
    sums: frozenset = NONE
    whole: frozenset = NONE
    linear: tuple[frozenset[int], ...] = ()
    anchors: frozenset[int] = NONE


def solve(factors: Factors, call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Return the cheapest choice of one label to shard, or of none."""
    if _passes_partial(factors, ins):
        return Choice(ins, tuple(PARTIAL for _ in call.outs))
    best = _replicated(factors, call)
    cost = _cost(call, ins, best.wants)
    if _anchored(factors, ins):
        cost = float("inf")
    for label, blocks in _candidates(factors, ins):
        if not _may_shard(factors, call, ins, label, blocks):
            continue
        choice = _sharded(factors, call, label, blocks)
        price = _cost(call, ins, choice.wants)
        if price < cost or (price == cost and best.outs == _replicated(factors, call).outs):
            best, cost = choice, price
    return best


def broadcast(shapes: Iterable[tuple[int, ...]], out: tuple[int, ...]) -> tuple[Labels, ...]:
    """Return the labels of inputs that broadcast to ``out``: the number of the output dim."""
    return tuple(
        tuple(
            None if extent == 1 and out[dim] != 1 else dim
            for dim, extent in enumerate(shape, len(out) - len(shape))
        )
        for shape in shapes
    )


def _passes_partial(factors: Factors, ins: tuple[Placement, ...]) -> bool:
    """Tell whether all that isn't replicated is partial, and the operator is linear in that."""
    partial = frozenset(i for i, p in enumerate(ins) if isinstance(p, Partial))
    sharded = any(isinstance(p, Shard) for p in ins)
    return bool(partial) and not sharded and partial in factors.linear


def _candidates(
    factors: Factors, ins: tuple[Placement, ...]
) -> list[tuple[Label, tuple[int, ...]]]:
    """Return the (label, blocks) along which some input is split, each once, in input order."""
    found = ((factors.ins[i][p.dim], p.blocks) for i, p in enumerate(ins) if isinstance(p, Shard))
    return list(dict.fromkeys((label, blocks) for label, blocks in found if label is not None))


def _may_shard(
    factors: Factors, call: Call, ins: tuple[Placement, ...], label: Label, blocks: tuple[int, ...]
) -> bool:
    if label in factors.whole:
        return False
    holders = [(i, labels.index(label)) for i, labels in enumerate(factors.ins) if label in labels]
    split = {i for i, dim in holders if ins[i] == Shard(dim, blocks)}
    others = {i for i, _ in holders} - split
    extent = max(call.shapes[i][dim] for i, dim in holders)
    # Nothing can be cut to a padded size here, and padding must not enter a sum.
    if is_padded(blocks, extent) and (others or label in factors.sums):
        return False
    # Splitting the other operand of a contraction would make a partial sum that nobody asked for:
    # only a weight (which the plan placed) may demand it.
    if label in factors.sums and others and not split & factors.anchors:
        return False
    if _anchored(factors, ins) - split:
        return False
    if blocks:
        # Blocks of query heads say nothing of the fewer key heads that go with them.
        is_one_extent = len({call.shapes[i][dim] for i, dim in holders}) == 1
        return is_one_extent and all(block % call.size == 0 for block in blocks)
    return all(call.shapes[i][dim] % call.size == 0 for i, dim in holders)


def _anchored(factors: Factors, ins: tuple[Placement, ...]) -> frozenset[int]:
    """Return the anchors that are split along a dimension that may stay split."""
    return frozenset(
        i
        for i in factors.anchors
        if isinstance(ins[i], Shard) and factors.ins[i][ins[i].dim] not in factors.whole
    )


def is_padded(blocks: tuple[int, ...], extent: int) -> bool:
    """Tell whether a shard's one block is longer than the dimension: the rest is padding."""
    return bool(blocks) and sum(blocks) != extent


def is_split_last(call: Call, placement: Placement) -> bool:
    """Tell whether the first input is split along its last dim, in one block, padded or not."""
    if not isinstance(placement, Shard) or placement.dim != len(call.shapes[0]) - 1:
        return False
    return len(placement.blocks) <= 1


def _sharded(factors: Factors, call: Call, label: Label, blocks: tuple[int, ...]) -> Choice:
    wants = tuple(
        _along(labels, label, blocks, shape)
        for labels, shape in zip(factors.ins, call.shapes, strict=True)
    )
    outs = tuple(
        PARTIAL if label not in labels else _along(labels, label, blocks, shape)
        for labels, shape in zip(factors.outs, call.outs, strict=True)
    )
    return Choice(wants, outs)


def _along(
    labels: Labels, label: Label, blocks: tuple[int, ...], shape: tuple[int, ...]
) -> Placement:
    if label not in labels:
        return REPLICATE
    dim = labels.index(label)
    return normalize(Shard(dim, blocks), shape[dim])


def _replicated(factors: Factors, call: Call) -> Choice:
    return Choice((REPLICATE,) * len(factors.ins), (REPLICATE,) * len(call.outs))


def _cost(call: Call, ins: tuple[Placement, ...], wants: tuple[Placement, ...]) -> float:
    """Return the elements that the conversions move, as a rough price."""
    return sum(
        _price(have, want) * _numel(shape)
        for have, want, shape in zip(ins, wants, call.shapes, strict=True)
    )


def _price(have: Placement, want: Placement) -> int:
    if have == want or isinstance(have, Replicate):
        return 0
    return 2 if isinstance(have, Partial) and isinstance(want, Replicate) else 1


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
