"""Say of every wait that nothing hides what it waits for, and why it could not start earlier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from autoshard.ir.aliases import is_view
from autoshard.ir.graph_function import GraphFunction
from autoshard.ir.node_info import info
from autoshard.ir.program import Program
from autoshard.ops import collectives as ops
from autoshard.passes._gathers import Gather, find_gathers
from autoshard.units import show_bytes

_FREE = frozenset({ops.wait, ops.release, ops.pack, *ops.STARTS})


@dataclass(frozen=True)
class ExposedWait:
    """A wait with no computation between its start and itself."""

    path: str  # of the module that waits
    what: str  # "a gather of 1.2 MiB"
    reason: str

    def __str__(self) -> str:
        return f"waits for {self.what} with nothing to compute meanwhile: {self.reason}"


def exposed_waits(function: GraphFunction, program: Program, depth: int) -> Iterator[ExposedWait]:
    """Yield the exposed waits of a phase in order.

    ``depth`` is how many units ahead gathers may start; one that starts later was held back.
    """
    order = {node: index for index, node in enumerate(function.graph.nodes)}
    compute = [order[node] for node in order if _computes(node)]
    late = _held_back(find_gathers(function, program), depth, order)
    for node in order:
        if node.target is not ops.wait:
            continue
        start = node.args[0]
        if not any(order[start] < at < order[node] for at in compute):
            is_first = not any(at < order[start] for at in compute)
            reason = _reason(start, is_first, depth, start in late)
            yield ExposedWait(info(node).path, _what(start), reason)


def _held_back(gathers: Sequence[Gather], depth: int, order: Mapping[Node, int]) -> set[Node]:
    """Return the starts that stand behind the wait ``depth`` units earlier."""
    earliest = [gathers[max(index - depth, 0)].needed_at for index in range(len(gathers))]
    pairs = zip(gathers, earliest, strict=True)
    return {g.start for g, place in pairs if g.start is not None and order[g.start] > place}


def _reason(start: Node, is_first: bool, depth: int, is_late: bool) -> str:
    if start.target is not ops.all_gather_start:
        return "it starts with the last gradient that is computed"
    if is_late:
        return "an earlier start would pass `max_gathered`"
    if is_first:
        return "nothing is computed before it"
    return f"`prefetch = {depth}` starts it no earlier"


def _what(start: Node) -> str:
    value = start.args[0].meta["val"]
    if start.target is ops.all_gather_start:
        value = start.meta["val"]
        return f"a gather of {show_bytes(value.numel() * value.element_size())}"
    name = "a reduction" if start.target is ops.all_reduce_start else "a reduce_scatter"
    return f"{name} of {show_bytes(value.numel() * value.element_size())}"


def _computes(node: Node) -> bool:
    return node.op == "call_function" and node.target not in _FREE and not is_view(node)
