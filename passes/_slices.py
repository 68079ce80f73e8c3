"""Slices that take a split dimension apart, as one split: its transpose is one join.

A slice's transpose is a tensor of zeros with one filled part, and how zeros lie over the ranks
nobody can tell from them; a join keeps the blocks.
"""

from __future__ import annotations

import operator
from itertools import pairwise

import torch
from torch.fx import Node

from autoshard.ir.node_info import val
from autoshard.ir.rewrite import Rewriter
from autoshard.ir.rules.call import bound_arguments, shapes_of

aten = torch.ops.aten


def join_slices(rewriter: Rewriter, node: Node, dim: int) -> tuple[list[Node], list[Node]]:
    """Replace all slices of ``node``'s input along ``dim`` by one split, where they don't overlap.

    rewrite: ``x[.., :8]``, ``x[.., 8:12]``, ``x[.., 12:]`` --> ``split_with_sizes(x, [8, 4, 4])``
    Returns the nodes made, in order, and the slices that are gone; nothing for one that is alone.
    """
    source = node.args[0]
    cuts = {n: _range(n) for n in source.users if _is_plain(n) and _dim(n) == dim}
    ranges = sorted(set(cuts.values()))
    touching = pairwise(ranges)
    if len(ranges) < 2 or any(a[1] > b[0] for a, b in touching):
        return [], []
    edges = sorted({0, shapes_of(source)[0][dim], *(edge for pair in ranges for edge in pair)})
    pieces = list(pairwise(edges))
    with rewriter.before(node):
        lengths = [stop - start for start, stop in pieces]
        split = rewriter.call(aten.split_with_sizes.default, source, lengths, dim, like=node)
        items = {
            piece: rewriter.call(
                operator.getitem, split, pieces.index(piece), like=_at(cuts, piece)
            )
            for piece in ranges
        }
    for cut, piece in cuts.items():
        rewriter.replace(cut, items[piece])
    return [split, *items.values()], list(cuts)


def _at(cuts: dict[Node, tuple[int, int]], piece: tuple[int, int]) -> Node:
    return next(node for node, found in cuts.items() if found == piece)


def _is_plain(node: Node) -> bool:
    return node.target is aten.slice.Tensor and bound_arguments(node)["step"] == 1


def _dim(node: Node) -> int:
    return bound_arguments(node)["dim"] % val(node).dim()


def _range(node: Node) -> tuple[int, int]:
    given = bound_arguments(node)
    extent = shapes_of(node.args[0])[0][_dim(node)]
    start, stop, _ = slice(given["start"], given["end"]).indices(extent)
    return start, stop
