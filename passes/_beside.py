"""Find what a phase may compute while a collective is under way, at no higher a peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from autoshard.cost.footprint import leaves
from autoshard.cost.traffic import tensor_bytes
from autoshard.ir.aliases import is_view
from autoshard.ir.flops import node_flops
from autoshard.ir.graph_function import GraphFunction
from autoshard.passes._live_bytes import LiveBytes, Units
from autoshard.passes._starts import STARTS


@dataclass(frozen=True)
class Part:
    """A stretch of a phase that ends with a collective.

    In the new order ``before`` comes first, then the start, then ``inside``, which needs no result.
    """

    before: tuple[Node, ...]
    whole: Node
    inside: tuple[Node, ...] = ()
    is_full: bool = False  # more could stand inside, but it would raise the peak

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Return all nodes in the new order."""
        return (*self.before, self.whole, *self.inside)


def find_parts(function: GraphFunction, flops_per_byte: int, units: Units) -> list[Part]:
    """Return the parts of a phase in order; calls behind the last collective are in none.

    Nodes go behind a start from the last to the first - the nearest keep least alive - until they
    compute ``flops_per_byte`` for each byte of the result. A collective with no matrix product to
    hide behind takes half of those of the one before it. ``units`` are what ZeRO will make.
    """
    if not any(node.target in STARTS for node in function.graph.nodes):
        return []
    live, parts, stretch = LiveBytes(function, units), list[Part](), list[Node]()
    for node in function.graph.nodes:
        if node.op != "call_function":
            continue
        stretch.append(node)
        if node.target not in STARTS:
            continue
        part = _fill(stretch, live, flops_per_byte)
        if parts and not _flops(part.inside):
            parts[-1], part = _share(parts[-1], part, live)
        parts.append(part)
        stretch = []
    return parts


def computes(node: Node) -> bool:
    """Tell whether a call takes time: views and items of tuples do not."""
    return node.op == "call_function" and not is_view(node) and bool(leaves(node))


def _fill(stretch: Sequence[Node], live: LiveBytes, flops_per_byte: int) -> Part:
    """Put what a collective, the last of a stretch, does not need behind its start."""
    *others, whole = stretch
    part, needed = Part(tuple(others), whole), _needed(whole, others)
    free = [node for node in others if node not in needed]
    wanted = tensor_bytes(whole) * flops_per_byte
    for place in reversed(range(len(free))):
        if _flops(part.inside) >= wanted:
            break
        if not computes(free[place]):
            continue
        inside = tuple(free[place:])
        fuller = Part(_without(others, inside), whole, inside)
        if not live.fits(fuller.nodes):
            return Part(part.before, whole, part.inside, is_full=True)
        part = fuller
    return part


def _share(earlier: Part, later: Part, live: LiveBytes) -> tuple[Part, Part]:
    """Let ``later`` have the last matrix products inside ``earlier``, half of their operations."""
    half, cut = _flops(earlier.inside) / 2, len(earlier.inside)
    while cut and _flops(earlier.inside[cut - 1 :]) <= half:
        cut -= 1
    moved = earlier.inside[cut:]
    needed = _needed(later.whole, (*earlier.inside, *later.before))
    readers = {user for node in moved for user in node.users}
    if not _flops(moved) or not needed.isdisjoint(moved) or not readers.isdisjoint(later.before):
        return earlier, later
    given = Part(earlier.before, earlier.whole, earlier.inside[:cut], earlier.is_full)
    taken = Part(later.before, later.whole, (*moved, *later.inside), later.is_full)
    fits = live.fits((*given.nodes, *taken.nodes))
    return (given, taken) if fits else (earlier, later)


def _needed(whole: Node, others: Sequence[Node]) -> set[Node]:
    """Return what ``whole`` depends on, of ``others``, which stand in order."""
    found = {whole}
    for node in (whole, *reversed(others)):
        if node in found:
            found.update(node.all_input_nodes)
    return found


def _without(nodes: Sequence[Node], left_out: Sequence[Node]) -> tuple[Node, ...]:
    gone = set(left_out)
    return tuple(node for node in nodes if node not in gone)


def _flops(nodes: Sequence[Node]) -> int:
    return sum(map(node_flops, nodes))
