"""Look-ups: embedding, gather, advanced indexing. The dimension that is looked up is whole."""

from __future__ import annotations

import torch

from autoshard.ir.placement import PARTIAL, REPLICATE, Placement, Shard
from autoshard.ir.rules.call import Call, Choice, Rule, TensorRef, replicate
from autoshard.ir.rules.factors import Factors, Labels, broadcast, solve
from autoshard.ir.rules.pointwise import overloads

aten = torch.ops.aten


def _embedding(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``vd, ... -> ...d``; split rows need the vocabulary-parallel form (a partial sum)."""
    if isinstance(ins[0], Shard) and ins[0].dim == 0:
        return Choice((ins[0], REPLICATE), (PARTIAL,), instead="vocab_embedding")
    rows = tuple(range(len(call.shapes[1])))
    factors = Factors(
        (("v", "d"), rows),
        ((*rows, "d"),),
        whole=frozenset("v"),
        linear=(frozenset({0}),),
        anchors=frozenset({0}),
    )
    return solve(factors, call, ins)


def _index(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Index tensors broadcast together; their dims stand where the indexed dims stood.

    An index that counts a whole dimension (``x[arange(B)[:, None], t]``) keeps it: on local shapes
    it counts this rank's part, so the dimension may be split.
    """
    indices = call["indices"]
    places = [d for d, index in enumerate(indices) if isinstance(index, TensorRef)]
    refs = [indices[d].index for d in places]
    if any(call.shapes[r] == () for r in refs) or not places:
        return replicate(call)
    together = list(range(places[0], places[-1] + 1)) == places
    shape = torch.broadcast_shapes(*(call.shapes[r] for r in refs))
    mixed: list[Labels] = list(broadcast((call.shapes[r] for r in refs), tuple(shape)))
    names = [tuple(None if j is None else ("i", j) for j in labels) for labels in mixed]
    rank = len(call.shapes[0])
    own: list = [d for d in range(rank)]
    whole = {d for d in places}
    for d, ref, labels in zip(places, refs, names, strict=True):
        long = [label for label in labels if label is not None]
        if ref in call.iotas and len(long) == 1:
            own[d] = long[0]
            whole.discard(d)
    block = [("i", j) for j in range(len(shape))]
    kept = [label for d, label in enumerate(own) if d not in places]
    at = places[0] if together else 0
    out = (*kept[:at], *block, *kept[at:])
    ordered = _by_reference(
        len(call.shapes), {0: tuple(own), **dict(zip(refs, names, strict=True))}
    )
    return solve(Factors(ordered, (tuple(out),), whole=frozenset(whole)), call, ins)


def _by_reference(count: int, labels: dict[int, Labels]) -> tuple[Labels, ...]:
    return tuple(labels[i] for i in range(count))


def _gather(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``x[..., d], index[..., e] -> [..., e]``; other dims must be equally long to go together."""
    x, index = call.shapes
    dim = call.dim()
    own = tuple("d" if i == dim else i for i in range(len(x)))
    labels = tuple(
        "e" if i == dim else (i if x[i] == index[i] else ("cut", i)) for i in range(len(index))
    )
    whole = frozenset({"d", *(i for i in range(len(x)) if i not in labels and i != dim)})
    return solve(Factors((own, labels), (labels,), whole=whole), call, ins)


def _index_select(call: Call, ins: tuple[Placement, ...]) -> Choice:
    dim = call.dim()
    own = tuple("d" if i == dim else i for i in range(len(call.shapes[0])))
    out = tuple("e" if i == dim else i for i in range(len(call.outs[0])))
    return solve(Factors((own, ("e",)), (out,), whole=frozenset("d")), call, ins)


def _one_hot(call: Call, ins: tuple[Placement, ...]) -> Choice:
    labels = tuple(range(len(call.shapes[0])))
    return solve(Factors((labels,), ((*labels, None),)), call, ins)


TABLE: dict[object, Rule] = {
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
    aten.gather.default: _gather,
    aten.index_select.default: _index_select,
    **dict.fromkeys(overloads("one_hot.default"), _one_hot),
}
