"""Readings of splits and joins: pieces are slices, a join is the sum of pieces put in zeros.

So a packed output reads the same whether the model takes it apart by slices or by one split.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch.fx import Node

from autoshard.ir.node_info import val
from autoshard.ir.rules.call import bound_arguments
from autoshard.proof.reader import Reader, Reading, Value

aten = torch.ops.aten
ZEROS = frozenset({"aten.new_zeros.default", "aten.zeros_like.default", "aten.zeros.default"})


def _split(reader: Reader, node: Node) -> Value:
    given = bound_arguments(node)
    source, dim = given["self"], given["dim"] % val(given["self"]).dim()
    ranges = _ranges([piece.shape[dim] for piece in val(node)], reader.factor(source, dim))
    if len(ranges) == 1:
        return (reader.env[source],)
    whole = reader.shape(source)
    return tuple(
        reader.terms.make("slice", (reader.env[source],), dim, start, end, 1, whole, shape)
        for (start, end), shape in zip(ranges, reader.shapes(node), strict=True)
    )


def _join(reader: Reader, node: Node) -> Value:
    given = bound_arguments(node)
    parts, dim = given["tensors"], given["dim"] % val(node).dim()
    ranges = _ranges([val(part).shape[dim] for part in parts], reader.factor(node, dim))
    whole = reader.shape(node)
    held = [
        reader.terms.make(
            "unslice", (reader.env[part],), dim, start, end, 1, reader.shape(part), whole
        )
        for part, (start, end) in zip(parts, ranges, strict=True)
        if reader.terms.made[reader.env[part]].op not in ZEROS
    ]
    return reader.terms.add(*held) if held else None


def _ranges(lengths: list[int], factor: int) -> list[tuple[int, int]]:
    """Return where each piece starts and ends in the whole value."""
    return list(pairwise(edge * factor for edge in accumulate(lengths, initial=0)))


TABLE: dict[object, Reading] = {
    aten.split_with_sizes.default: _split,
    aten.split.Tensor: _split,
    aten.cat.default: _join,
}
