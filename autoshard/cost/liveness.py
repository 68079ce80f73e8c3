"""Peak bytes of one graph: a simulation of allocations and of `del` after last use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree


def storage_of(node: Node) -> tuple[tuple[Hashable, int], ...]:
    """Return (key, bytes) of every storage a node's value lies in; views share their base's."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    storages = [v.untyped_storage() for v in leaves if isinstance(v, torch.Tensor)]
    return tuple((storage._cdata, storage.nbytes()) for storage in storages)


def peak_bytes(graph: Graph) -> int:
    """Return the most bytes live at once that the graph itself allocates.

    Placeholders belong to the caller and are not counted; outputs live to the end.
    """
    born: dict[Hashable, int] = {}
    sizes: dict[Hashable, int] = {}
    dies: dict[Hashable, int] = {}
    given = {key for n in graph.find_nodes(op="placeholder") for key, _ in storage_of(n)}
    for index, node in enumerate(graph.nodes):
        for source in (node, *node.all_input_nodes):
            for key, nbytes in storage_of(source):
                if key in given:
                    continue
                born.setdefault(key, index)
                sizes[key] = nbytes
                dies[key] = index
    return _sweep(born, sizes, dies)


def _sweep(born: dict, sizes: dict, dies: dict) -> int:
    change: dict[int, int] = defaultdict(int)
    for key, index in born.items():
        change[index] += sizes[key]
        change[dies[key] + 1] -= sizes[key]
    live = peak = 0
    for index in sorted(change):
        live += change[index]
        peak = max(peak, live)
    return peak
