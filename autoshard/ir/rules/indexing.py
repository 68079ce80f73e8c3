"""Look-ups: embedding, gather, advanced indexing. The dimension that is looked up is whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autoshard.ir.placement import PARTIAL, REPLICATE, Placement, Shard
from autoshard.ir.rules.call import Call, Choice, Rule, TensorRef
from autoshard.ir.rules.factors import Factors, Label, Labels, broadcast, is_split_last, solve
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


@dataclass(frozen=True)
class Lookup:
    """The labels of ``x[i, j, ...]``: of x, of each index tensor, and of the result.

    Index tensors broadcast together; their dims stand where the indexed dims stood. An index that
    counts a whole dimension (``x[arange(B)[:, None], t]``) keeps it: on local shapes it counts this
    rank's part, so the dimension may be split.
    """

    own: Labels
    read: tuple[Labels, ...]
    out: Labels
    whole: frozenset

    @staticmethod
    def of(call: Call) -> Lookup:
        """Return the labels of a call with ``self`` and ``indices``."""
        indices = call["indices"]
        places = {d: r.index for d, r in enumerate(indices) if isinstance(r, TensorRef)}
        shapes = [call.shapes[ref] for ref in places.values()]
        shape = tuple(torch.broadcast_shapes(*shapes))
        read: list[Labels] = []
        own: list = list(range(len(call.shapes[0])))
        whole = set(places)
        for (d, ref), labels in zip(places.items(), broadcast(shapes, shape), strict=True):
            read.append(tuple(None if j is None else ("i", j) for j in labels))
            counted = _counted(call, d, ref, read[-1])
            if counted is not None:
                own[d], read[-1] = counted, (None,) * len(labels)
                whole.discard(d)
        first, last = min(places), max(places)
        at = first if last - first + 1 == len(places) else 0
        kept = [label for d, label in enumerate(own) if d not in places]
        out = (*kept[:at], *(("i", j) for j in range(len(shape))), *kept[at:])
        return Lookup(tuple(own), tuple(read), out, frozenset(whole))


def _index(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``x[i, j]``: the indexed dims are whole, the index's own dims may be split."""
    look = Lookup.of(call)
    return solve(Factors((look.own, *look.read), (look.out,), whole=look.whole), call, ins)


def _counted(call: Call, dim: int, ref: int, labels: Labels) -> Label:
    """Return the label of the dim along which an index counts all of ``dim``, if it does."""
    if ref not in call.iotas:
        return None
    extents = zip(labels, call.shapes[ref], strict=True)
    full = [label for label, n in extents if label is not None and n == call.shapes[0][dim]]
    return full[0] if full else None


def _gather(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``x[..., d], index[..., e] -> [..., e]``; other dims must be equally long to go together.

    An index with fewer rows reads x's first rows: a part of it would, too.
    """
    x, index = call.shapes
    dim = call.dim()
    if dim == len(x) - 1 and x[:-1] == index[:-1] and is_split_last(call, ins[0]):
        return Choice((ins[0], REPLICATE), (PARTIAL,), instead="vocab_gather")
    own = tuple("d" if i == dim else i for i in range(len(x)))
    labels = tuple(
        "e" if i == dim else (i if x[i] == index[i] else ("cut", i)) for i in range(len(index))
    )
    loose = {label for label in labels if isinstance(label, tuple)}
    whole = frozenset({"d", *loose, *(i for i in range(len(x)) if i not in labels and i != dim)})
    return solve(Factors((own, labels), (labels,), whole=whole), call, ins)


def _index_select(call: Call, ins: tuple[Placement, ...]) -> Choice:
    dim = call.dim()
    own = tuple("d" if i == dim else i for i in range(len(call.shapes[0])))
    out = tuple("e" if i == dim else i for i in range(len(call.outs[0])))
    return solve(Factors((own, ("e",)), (out,), whole=frozenset("d")), call, ins)


def _bucketize(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``..., bounds -> ...``: every element is compared with all bounds."""
    labels = tuple(range(len(call.shapes[0])))
    whole = frozenset({"bounds"})
    return solve(Factors((labels, ("bounds",)), (labels,), whole=whole), call, ins)


def _one_hot(call: Call, ins: tuple[Placement, ...]) -> Choice:
    labels = tuple(range(len(call.shapes[0])))
    return solve(Factors((labels,), ((*labels, None),)), call, ins)


TABLE: dict[object, Rule] = {
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
    aten.gather.default: _gather,
    aten.index_select.default: _index_select,
    aten.bucketize.Tensor: _bucketize,
    **dict.fromkeys(overloads("one_hot.default"), _one_hot),
}
