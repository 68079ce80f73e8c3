"""When generated code makes, hands over and frees the values of a graph.

What runs and what predicts its memory both read this, so they can't disagree about who lives when.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch.fx import Node

from autoshard.ir.graph_function import GRAD, GraphFunction, Port
from autoshard.ir.node_info import val
from autoshard.ops.collectives import pack


@dataclass(frozen=True)
class Write:
    """One gradient on its way into a packed bucket."""

    bucket: Node  # the pack
    value: Node
    offset: int
    is_first: bool  # the bucket is made for it


@dataclass(frozen=True)
class Lifetimes:
    """What happens right after a node, in this order: writes, hand-overs, deaths."""

    writes: dict[Node, list[Write]]
    handed: dict[Node, list[Port]]  # gradients: they don't wait for the end of the graph
    dies: dict[Node, list[Node]]  # what nothing reads any more; what is returned never dies


def lifetimes(function: GraphFunction) -> Lifetimes:
    """Return the lifetimes of a graph's values.

    A pack does not wait for its last gradient: each is copied into the bucket once it is made, and
    may die. Where other buckets' gradients come in between, the bucket is made after them.
    """
    order = {node: index for index, node in enumerate(function.graph.nodes)}
    writes = _writes(function, order)
    written_at = {(w.bucket, w.value): node for node, found in writes.items() for w in found}
    handed: dict[Node, list[Port]] = defaultdict(list)
    returned = set()
    for port, node in zip(function.outputs, function.results, strict=True):
        if node is not None and port.kind == GRAD and node.op == "call_function":
            handed[node].append(port)
        else:
            returned.add(node)
    dies: dict[Node, list[Node]] = defaultdict(list)
    for node in function.graph.nodes:
        reads = [n if n.op != "output" else node for n in node.users]
        places = [written_at.get((reader, node), reader) for reader in reads]
        if places and node not in returned:
            dies[max(places, key=order.__getitem__)].append(node)
    return Lifetimes(writes, handed, dies)


def _writes(function: GraphFunction, order: dict[Node, int]) -> dict[Node, list[Write]]:
    """Return node -> what is copied into buckets right after it."""
    births = []  # (index, bucket, value, offset)
    for bucket in function.graph.find_nodes(op="call_function", target=pack):
        offset = 0
        for value in bucket.args[0]:
            born = value if value.op == "call_function" else bucket
            births.append((order[born], bucket, value, offset))
            offset += val(value).numel()
    births.sort(key=lambda birth: birth[0])
    opened: dict[Node, int] = {}
    for i, (index, bucket, _, _) in enumerate(births):
        if i == 0 or births[i - 1][1] is not bucket:
            opened[bucket] = index
    nodes, seen = list(function.graph.nodes), set()
    writes: dict[Node, list[Write]] = defaultdict(list)
    for index, bucket, value, offset in births:
        write = Write(bucket, value, offset, bucket not in seen)
        writes[nodes[max(index, opened[bucket])]].append(write)
        seen.add(bucket)
    return writes
