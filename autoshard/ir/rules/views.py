"""Operators that move elements without computing: reshapes, permutations, pieces, joins.

All of them let partial sums through. Along a split dimension a piece must be made of whole blocks:
a plain split of a packed q|k|v refuses with ``packed`` instead of handing rank 0 all queries.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autoshard.ir.placement import (
    PARTIAL,
    REPLICATE,
    Partial,
    Placement,
    Replicate,
    Shard,
    normalize,
)
from autoshard.ir.rules.call import Call, Choice, Rule, keep, replicate
from autoshard.ir.rules.factors import Factors, Labels, broadcast, is_padded, solve
from autoshard.ir.rules.pointwise import overloads
from autoshard.ir.rules.reshape import reshape_shard

aten = torch.ops.aten
JOINT = (frozenset({0}),)


def _reshape(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Follow the cut through row-major order, or refuse with ``heads``."""
    (placement,) = ins
    if not isinstance(placement, Shard):
        return keep(call, ins, placement)
    out = reshape_shard(placement, call.shapes[0], call.outs[0], call.size)
    return replicate(call, refusal="heads") if out is None else keep(call, ins, out)


def _view_as(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """As a reshape to the shape of the second input, which must lie as the result does."""
    choice = _reshape(call, ins[:1])
    (out,) = choice.outs
    like = out if isinstance(out, Shard) else REPLICATE
    return replace(choice, wants=(*choice.wants[:1], like))


def _relabel(call: Call, ins: tuple[Placement, ...], labels: Labels, out: Labels) -> Choice:
    return solve(Factors((labels,), (out,), linear=JOINT), call, ins)


def _permute(call: Call, ins: tuple[Placement, ...]) -> Choice:
    order = call.dims("dims")
    return _relabel(call, ins, tuple(range(len(order))), order)


def _transpose(call: Call, ins: tuple[Placement, ...]) -> Choice:
    order = list(range(len(call.shapes[0])))
    if order:
        a, b = call.dim("dim0"), call.dim("dim1")
        order[a], order[b] = order[b], order[a]
    return _relabel(call, ins, tuple(range(len(order))), tuple(order))


def _t(call: Call, ins: tuple[Placement, ...]) -> Choice:
    labels = tuple(range(len(call.shapes[0])))
    return _relabel(call, ins, labels, labels[::-1])


def _unsqueeze(call: Call, ins: tuple[Placement, ...]) -> Choice:
    rank = len(call.shapes[0])
    at = call["dim"] % (rank + 1)
    labels = tuple(range(rank))
    return _relabel(call, ins, labels, (*labels[:at], None, *labels[at:]))


def _squeeze(call: Call, ins: tuple[Placement, ...]) -> Choice:
    shape = call.shapes[0]
    asked = call.dims() if "dim" in call.arguments else range(len(shape))
    gone = {dim for dim in asked if shape[dim] == 1}
    labels = tuple(range(len(shape)))
    return _relabel(call, ins, labels, tuple(d for d in labels if d not in gone))


def _expand(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Repeat along new and size-1 dims: the copy is constant there, whichever its local size."""
    out = call.outs[0]
    labels = broadcast(call.shapes, out)
    factors = Factors(labels, (tuple(range(len(out))),), linear=JOINT)
    choice = solve(factors, call, ins)
    if choice.outs != (REPLICATE,):
        return choice
    uniform = tuple(d for d in range(len(out)) if d not in labels[0] and out[d] != 1)
    return Choice(choice.wants, choice.outs, uniform=uniform)


def _broadcast_tensors(call: Call, ins: tuple[Placement, ...]) -> Choice:
    labels = tuple(range(len(call.outs[0])))
    outs = (labels,) * len(call.outs)
    return solve(Factors(broadcast(call.shapes, call.outs[0]), outs), call, ins)


def _repeat(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Repeat as tiles: a split dim may only be repeated once; tiles of a whole dim are new dims."""
    out, shape = call.outs[0], call.shapes[0]
    lead = len(out) - len(shape)
    labels = tuple(range(lead, len(out)))
    whole = frozenset(d for d in labels if out[d] != shape[d - lead])
    result = tuple(None if d < lead else d for d in range(len(out)))
    choice = solve(Factors((labels,), (result,), whole=whole, linear=JOINT), call, ins)
    if choice.outs != (REPLICATE,):
        return choice
    extents = (1,) * lead + shape
    # Equal parts of a dim made of whole tiles are equal.
    uniform = (d for d in range(len(out)) if out[d] // max(extents[d], 1) % call.size == 0)
    return replace(choice, uniform=tuple(d for d in uniform if out[d] > extents[d]))


def _repeat_interleave(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Repeat each element along a dim in place: parts repeat into parts, blocks grow."""
    (placement,), dim = ins, call["dim"]
    if dim is None:
        return replicate(call) if isinstance(placement, Shard) else keep(call, ins, placement)
    dim %= len(call.shapes[0])
    if isinstance(placement, Shard) and placement.dim == dim:
        if is_padded(placement.blocks, call.shapes[0][dim]):
            return replicate(call)
        longer = tuple(block * call["repeats"] for block in placement.blocks)
        return keep(call, ins, Shard(dim, longer))
    return keep(call, ins, placement)


def _diagonal(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``..m n -> ..d``: both dims of the diagonal are whole."""
    labels = tuple(range(len(call.shapes[0])))
    whole = frozenset({call.dim("dim1"), call.dim("dim2")})
    out = (*(d for d in labels if d not in whole), "diagonal")
    return solve(Factors((labels,), (out,), whole=whole, linear=JOINT), call, ins)


def _diagonal_backward(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``..d -> ..m n``, zero beside the diagonal."""
    rank = len(call.outs[0])
    gone = {call["dim1"] % rank, call["dim2"] % rank}
    out = tuple(range(rank))
    given = (*(d for d in out if d not in gone), "diagonal")
    whole = frozenset({*gone, "diagonal"})
    return solve(Factors((given,), (out,), whole=whole, linear=JOINT), call, ins)


def _pixel_shuffle(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``..chw -> ..CHW``: channels and space change places, so they are whole."""
    lead = tuple(range(len(call.shapes[0]) - 3))
    before, after = (*lead, "c", "h", "w"), (*lead, "C", "H", "W")
    whole = frozenset("chwCHW")
    return solve(Factors((before,), (after,), whole=whole, linear=JOINT), call, ins)


def _unfold_backward(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``..windows..length -> ..``: windows overlap, so the unfolded dim is whole."""
    out = tuple(range(len(call.outs[0])))
    dim = call["dim"] % len(out)
    factors = Factors(((*out, "length"),), (out,), whole=frozenset({dim, "length"}), linear=JOINT)
    return solve(factors, call, ins)


def _meshgrid(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Vectors as dims of one grid; with "xy" the first two change places."""
    order = list(range(len(ins)))
    if call.arguments.get("indexing") == "xy" and len(order) > 1:
        order[:2] = order[1::-1]
    labels = tuple((i,) if shape else () for i, shape in enumerate(call.shapes))
    return solve(Factors(labels, (tuple(order),) * len(ins)), call, ins)


def _pieces(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Split, chunk and unbind: each piece must be whole blocks of a split dimension."""
    (placement,), dim = ins, call.dim()
    gone = call.op is aten.unbind.int
    if not isinstance(placement, Shard):
        return keep(call, ins, placement)
    if placement.dim != dim:
        return keep(call, ins, _without(placement, dim) if gone else placement)
    lengths = [1 if gone else out[dim] for out in call.outs]
    found = [] if gone else _cut(placement, call.shapes[0][dim], lengths)
    if not found:
        return replicate(call, refusal="packed")
    return Choice(ins, tuple(found))


def _cut(placement: Shard, extent: int, lengths: list[int]) -> list[Placement]:
    """Deal the blocks out to pieces of these lengths; nothing when a block straddles two."""
    rest = list(placement.blocks or (extent,))
    found: list[Placement] = []
    for length in lengths:
        own: list[int] = []
        while rest and sum(own) < length:
            own.append(rest.pop(0))
        if sum(own) != length:
            return []
        found.append(normalize(Shard(placement.dim, tuple(own)), length))
    return found


def _slice(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """A slice of a split dimension is whole blocks of it, or refused with ``packed``."""
    (placement,) = ins
    dim, shape, out = call.dim(), call.shapes[0], call.outs[0]
    if not isinstance(placement, Shard) or placement.dim != dim or shape == out:
        return keep(call, ins, placement)
    extent = shape[dim]
    start, stop = _bounds(call, extent)
    lengths = [start, stop - start, extent - stop]
    step = call.arguments.get("step", 1)
    found = _cut(placement, extent, lengths) if step == 1 and stop > start else []
    return Choice(ins, (found[1],)) if found else replicate(call, refusal="packed")


def _bounds(call: Call, extent: int) -> tuple[int, int]:
    """Return where a slice starts and stops in the whole dimension.

    The length of the output tells whether the literals speak of the whole or of one rank's part.
    """
    if call.op is aten.narrow.default:
        start, stop = call["start"] % extent, call["start"] % extent + call["length"]
    else:
        start, stop, _ = slice(call["start"], call["end"]).indices(extent)
    scale = call.outs[0][call.dim()] // max(stop - start, 1)
    return (start * scale, stop * scale) if scale == call.size else (start, stop)


def _select(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """One index along a dim, which goes; a split one lives on one rank only: refused."""
    (placement,), dim = ins, call.dim()
    if not isinstance(placement, Shard):
        return keep(call, ins, placement)
    if placement.dim == dim:
        return replicate(call, refusal="packed")
    return keep(call, ins, _without(placement, dim))


def _without(placement: Shard, dim: int) -> Shard:
    """Return the shard after ``dim`` is gone."""
    return Shard(placement.dim - (placement.dim > dim), placement.blocks)


def _cat(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Parts split along the joined dim give its blocks; else the dim stays whole."""
    dim = call["dim"] % len(call.outs[0])
    if all(isinstance(p, Partial) for p in ins):
        return keep(call, ins, PARTIAL)
    if all(isinstance(p, Shard) and p.dim == dim for p in ins):
        pairs = zip(ins, call.shapes, strict=True)
        blocks = tuple(b for p, shape in pairs for b in p.blocks or (shape[dim],))
        if sum(blocks) == call.outs[0][dim]:
            return keep(call, ins, Shard(dim, blocks))
    labels = tuple(range(len(call.outs[0])))
    factors = Factors((labels,) * len(ins), (labels,), whole=frozenset({dim}))
    return solve(factors, call, ins)


def _stack(call: Call, ins: tuple[Placement, ...]) -> Choice:
    labels = tuple(range(len(call.shapes[0])))
    at = call["dim"] % (len(labels) + 1)
    out = (*labels[:at], None, *labels[at:])
    joint = (frozenset(range(len(ins))),)
    return solve(Factors((labels,) * len(ins), (out,), linear=joint), call, ins)


def _pad(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """The padded dims are whole, those that (1, -1) shifts too; padding with zeros is linear."""
    rank = len(call.shapes[0])
    lengths = call.arguments.get("pad") or call["padding"]  # before and behind, last dim first
    ends = zip(lengths[::2], lengths[1::2], strict=True)
    padded = frozenset(rank - 1 - i for i, pair in enumerate(ends) if any(pair))
    labels = tuple(range(rank))
    zero = not call.arguments.get("value") and call.arguments.get("mode", "constant") == "constant"
    linear = JOINT if zero else ()
    return solve(Factors((labels,), (labels,), whole=padded, linear=linear), call, ins)


def _slice_scatter(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Write into a slice: the sliced dim is whole; jointly linear."""
    labels = tuple(range(len(call.shapes[0])))
    whole = frozenset({call.dim()})
    linear = (frozenset({0, 1}),)
    return solve(Factors((labels, labels), (labels,), whole=whole, linear=linear), call, ins)


def _select_scatter(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Write into one place of a dim, which is whole; jointly linear."""
    labels, dim = tuple(range(len(call.shapes[0]))), call.dim()
    written = tuple(d for d in labels if d != dim)
    factors = Factors(
        (labels, written), (labels,), whole=frozenset({dim}), linear=(frozenset({0, 1}),)
    )
    return solve(factors, call, ins)


def _unfold(call: Call, ins: tuple[Placement, ...]) -> Choice:
    rank, dim = len(call.shapes[0]), call.dim("dimension")
    labels = tuple(range(rank))
    factors = Factors((labels,), ((*labels, None),), whole=frozenset({dim}), linear=JOINT)
    return solve(factors, call, ins)


def getitem(ins: tuple[Placement, ...], index: int) -> Placement:
    """Return the placement of one output of a call with several."""
    return ins[index] if index < len(ins) else Replicate()


TABLE: dict[object, Rule] = {
    **dict.fromkeys(
        overloads(
            "view.default _unsafe_view.default reshape.default flatten.using_ints"
            " unflatten.int _reshape_alias.default"
        ),
        _reshape,
    ),
    aten.view_as.default: _view_as,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.unsqueeze.default: _unsqueeze,
    **dict.fromkeys(overloads("squeeze.dim squeeze.dims squeeze.default"), _squeeze),
    aten.expand.default: _expand,
    aten.broadcast_tensors.default: _broadcast_tensors,
    aten.repeat.default: _repeat,
    aten.tile.default: _repeat,
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.diagonal.default: _diagonal,
    aten.diagonal_backward.default: _diagonal_backward,
    **dict.fromkeys(overloads("pixel_shuffle.default pixel_unshuffle.default"), _pixel_shuffle),
    aten.unfold_backward.default: _unfold_backward,
    aten.meshgrid.indexing: _meshgrid,
    **dict.fromkeys(
        overloads(
            "split.Tensor split_with_sizes.default split.sizes chunk.default unbind.int"
            " unsafe_split.Tensor unsafe_chunk.default tensor_split.sections"
        ),
        _pieces,
    ),
    **dict.fromkeys(overloads("slice.Tensor narrow.default"), _slice),
    aten.select.int: _select,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    **dict.fromkeys(
        overloads(
            "pad.default constant_pad_nd.default reflection_pad1d.default reflection_pad2d.default"
            " replication_pad1d.default replication_pad2d.default"
        ),
        _pad,
    ),
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.unfold.default: _unfold,
}
