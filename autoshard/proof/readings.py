"""Readings of layout, arithmetic and reductions: what is erased and what has one spelling."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from math import prod
from struct import pack, unpack

import torch
from torch.fx import Node

from autoshard.ir.node_info import val
from autoshard.ir.rules import pointwise
from autoshard.ir.rules.call import Shape, bound_arguments
from autoshard.ops import collectives
from autoshard.proof.reader import Reader, Reading, Value, new_extents, reduction

aten = torch.ops.aten
MEANS = (aten.mean.default, aten.mean.dim)
TIMES = "times"
_PARTS = (collectives.shard, collectives.reduce_scatter, collectives.reduce_scatter_start)


def _first(reader: Reader, node: Node) -> Value:
    return reader.env[node.args[0]]


def _item(reader: Reader, node: Node) -> Value:
    held = reader.env[node.args[0]]
    return held[node.args[1]] if isinstance(held, tuple) else None


def _cast(reader: Reader, node: Node) -> Value:
    """A cast to a float type is erased; one that rounds to integers is not."""
    return _first(reader, node) if val(node).is_floating_point() else None


def _add(reader: Reader, node: Node) -> Value:
    given = bound_arguments(node)
    x, other = given["self"], given["other"]
    if given.get("alpha", 1) != 1:
        return None
    if isinstance(other, Node):
        shape = reader.shape(node)
        return reader.terms.add(reader.broadcast(x, shape), reader.broadcast(other, shape))
    return add_number(reader, reader.env[x], other)


def add_number(reader: Reader, x: int, number: float) -> int:
    """Return ``x + number``: as torch's own norms round it, to single precision."""
    single = unpack("f", pack("f", number))[0] if isinstance(number, float) else number
    return reader.call(aten.add.Scalar, x, single)


def _mul(reader: Reader, node: Node) -> Value:
    x, other = node.args[:2]
    if isinstance(other, float | int):
        return times(reader, reader.env[x], other)
    if not all(isinstance(n, Node) for n in (x, other)):
        return None
    return product(reader, *(reader.broadcast(n, reader.shape(node)) for n in node.args[:2]))


def _divide(reader: Reader, node: Node) -> Value:
    """A division by a number is a multiplication by one over it."""
    x, number = node.args[:2]
    if not isinstance(number, float | int) or number == 0:
        return None
    return times(reader, reader.env[x], 1.0 / number)


def times(reader: Reader, x: int, number: float) -> int:
    """Return ``x`` scaled by a number."""
    return reader.terms.make(TIMES, (x,), float(number))


def product(reader: Reader, a: int, b: int) -> int:
    """Return a product: its factors in one order."""
    return reader.terms.make(str(aten.mul.Tensor), sorted((a, b)))


def _addmm(reader: Reader, node: Node) -> Value:
    if node.kwargs:
        return None
    bias, x, y = node.args
    added = reader.broadcast(bias, reader.shape(node))
    x, y = reader.env[x], reader.env[y]
    return reader.terms.add(added, reader.terms.make("aten.mm.default", (x, y)))


def _mm(reader: Reader, node: Node) -> Value:
    return reader.terms.make("aten.mm.default", [reader.env[n] for n in node.args])


def _permute(reader: Reader, node: Node) -> Value:
    rank = val(node.args[0]).dim()
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [d % rank for d in node.args[1]]
    elif rank > 1:
        a, b = (0, 1) if node.target is aten.t.default else (d % rank for d in node.args[1:3])
        order[a], order[b] = order[b], order[a]
    return _permuted(reader, _first(reader, node), tuple(order), reader.shape(node.args[0]))


def _permuted(reader: Reader, x: int, order: tuple[int, ...], shape: Shape | None) -> int:
    """Return a permutation of a value read in ``shape``; one that undoes another vanishes."""
    if shape is not None:
        order, shape = _without_ones(order, shape)
    if order == tuple(range(len(order))):
        return x
    inner = reader.terms.made[x]
    # A padded matrix turned is the matrix turned, padded.
    shown = None if order == (1, 0) else shape
    if inner.op == "permute" and len(inner.attrs[0]) == len(order):
        before, read = inner.attrs
        turned = None if read is None or shown is None else tuple(read[d] for d in before)
        if turned == shown:
            both = tuple(before[d] for d in order)
            if both == tuple(range(len(both))):
                return inner.children[0]
            return reader.terms.make("permute", inner.children, both, read)
    return reader.terms.make("permute", (x,), order, shown)


def _without_ones(order: tuple[int, ...], shape: Shape) -> tuple[tuple[int, ...], Shape]:
    """Leave out the dims of extent 1: where they stand says nothing."""
    kept = [dim for dim, extent in enumerate(shape) if extent != 1]
    order = tuple(kept.index(dim) for dim in order if dim in kept)
    return order, tuple(shape[dim] for dim in kept)


def _expand(reader: Reader, node: Node) -> Value:
    return expanded(reader, _first(reader, node), reader.shape(node.args[0]), reader.shape(node))


def expanded(reader: Reader, x: int, before: Shape | None, after: Shape | None) -> int:
    """Return a value broadcast to a shape; the value itself where nothing is added.

    What was scaled before is scaled after: one spelling for the gradient of a mean.
    """
    if before is not None and after is not None and prod(before) == prod(after):
        return x
    made = reader.terms.made[x]
    if made.op == TIMES:
        return times(reader, expanded(reader, made.children[0], before, after), *made.attrs)
    return reader.terms.make("expand", (x,), after, *new_extents(before, after))


def _reduce(reader: Reader, node: Node) -> Value:
    given = bound_arguments(node)
    shape = reader.shape(node.args[0])
    rank = val(node.args[0]).dim()
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    gone = {d % max(rank, 1) for d in dims} if dims else set(range(rank))
    total = reduction(reader.terms, "sum", _first(reader, node), shape, gone)
    if node.target not in MEANS:
        return total
    return mean(reader, total, shape, gone)


def mean(reader: Reader, total: int, shape: Shape | None, gone: Iterable[int]) -> int:
    """Return the mean over dims ``gone`` of a value of a shape whose sum over them is ``total``."""
    if shape is None:
        return reader.terms.make("mean", (total,))
    return times(reader, total, 1.0 / max(prod(shape[dim] for dim in gone), 1))


def _slice(reader: Reader, node: Node) -> Value:
    given = bound_arguments(node)
    source, dim = given["self"], given["dim"] % val(given["self"]).dim()
    extent = val(source).shape[dim]
    start, end, _ = slice(given["start"], given["end"]).indices(extent)
    part = _joined_part(source, dim, start, end) if given["step"] == 1 else None
    if part is not None:
        return reader.env[part]
    start, end, step, factor = _start_end(reader, node, dim, start, end, given["step"])
    is_whole = start == 0 and end == extent * factor and step == 1
    if is_whole or _cuts_padding(reader, source, dim, start, end):
        return _first(reader, node)
    shapes = reader.shape(source), reader.shape(node)
    return reader.terms.make("slice", (_first(reader, node),), dim, start, end, step, *shapes)


def _joined_part(source: Node, dim: int, start: int, end: int) -> Node | None:
    """Return the value that a slice takes back out of a join, reduced in between or not."""
    while source.target in (collectives.all_reduce, collectives.all_reduce_start, collectives.wait):
        source = source.args[0]
    if source.target is not aten.cat.default or bound_arguments(source)["dim"] != dim:
        return None
    place = 0
    for part in source.args[0]:
        if (place, place + val(part).shape[dim]) == (start, end):
            return part
        place += val(part).shape[dim]
    return None


def _start_end(
    reader: Reader, node: Node, dim: int, start: int, end: int, step: int
) -> tuple[int, int, int, int]:
    """Return a slice's bounds in the whole value: on a split dim each rank takes its share."""
    factor = reader.factor(node, dim)
    return start * factor, end * factor, step, factor


def _cuts_padding(reader: Reader, source: Node, dim: int, start: int, end: int) -> bool:
    """Tell whether a slice takes the real part of what was gathered with its padding.

    The global shape of what is gathered has no padding, so it says where the real part ends.
    """
    if source.target not in (collectives.all_gather, collectives.all_gather_start):
        return False
    part, gathered, blocks = source.args[:3]
    real = reader.shape(part)
    if real is None or dim != gathered % len(real):
        return False
    return start == 0 and end == real[dim] < sum(blocks) == val(source).shape[dim]


def _scatter_back(reader: Reader, node: Node) -> Value:
    """Read ``slice_backward``, whose bounds are those of its slice."""
    given = bound_arguments(node)
    dim = given["dim"] % len(given["input_sizes"])
    extent = given["input_sizes"][dim]
    start, end, _ = slice(given["start"], given["end"]).indices(extent)
    start, end, step, _ = _start_end(reader, node, dim, start, end, given["step"])
    grad = given["grad_output"]
    if _fills_padding(reader, node, dim, start, end):
        return reader.env[grad]
    shapes = reader.shape(grad), reader.shape(node)
    return reader.terms.make("unslice", (reader.env[grad],), dim, start, end, step, *shapes)


def _fills_padding(reader: Reader, node: Node, dim: int, start: int, end: int) -> bool:
    """Tell whether ranks take their parts of what is filled up: the way back of `_cuts_padding`."""
    extent = val(node).shape[dim]
    for part in node.users:
        if part.target not in _PARTS or part.args[1] % val(node).dim() != dim:
            return False
        real = reader.shape(part)
        if real is None or not real[dim] == end < sum(part.args[2]) == extent:
            return False
    return start == 0 and bool(node.users)


def _none(reader: Reader, node: Node) -> Value:
    return ()


TABLE: dict[object, Reading] = {
    operator.getitem: _item,
    **dict.fromkeys(
        (
            collectives.copy_to,
            collectives.copy_within,
            collectives.from_copies,
            collectives.to_copies,
            collectives.all_reduce_within,
            collectives.all_reduce,
            collectives.all_gather,
            collectives.reduce_scatter,
            collectives.shard,
            collectives.all_reduce_start,
            collectives.all_gather_start,
            collectives.reduce_scatter_start,
            collectives.wait,
            *pointwise.overloads(
                "view.default reshape.default _unsafe_view.default alias.default clone.default"
                " contiguous.default unsqueeze.default squeeze.dim squeeze.dims squeeze.default"
                " lift_fresh_copy.default flatten.using_ints detach.default"
            ),
        ),
        _first,
    ),
    collectives.release: _none,
    aten._to_copy.default: _cast,
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.div.Tensor: _divide,
    aten.div.Scalar: _divide,
    aten.addmm.default: _addmm,
    aten.mm.default: _mm,
    aten.t.default: _permute,
    aten.transpose.int: _permute,
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.sum.default: _reduce,
    aten.sum.dim_IntList: _reduce,
    aten.mean.default: _reduce,
    aten.mean.dim: _reduce,
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _scatter_back,
}
