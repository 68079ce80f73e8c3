"""The bytes that a phase's values take, and what another order of some nodes makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from autoshard.cost.footprint import Storage, leaves, storages
from autoshard.cost.traffic import tensor_bytes
from autoshard.ir.graph_function import BOUNDARY, GRAD, PARAM, SAVED, TANGENT, GraphFunction, Port
from autoshard.passes._starts import STARTS

BUCKET = -1  # stands for the bucket that a gradient is written into


@dataclass(frozen=True)
class Units:
    """The unit of each parameter that a phase will gather, and of each whose gradient it reduces.

    ZeRO makes those buckets later: a gathered unit is whole from its first reader to the last, a
    reduced one from its first gradient to the last.
    """

    gathered: Mapping[str, str] = field(default_factory=dict)
    reduced: Mapping[str, str] = field(default_factory=dict)


class LiveBytes:
    """Which storages a phase's nodes touch, and when each is there.

    A gradient dies where it is made: it is added to a sum, which is there from the first of them
    on. So what came before the first gradient is no measure of what fits behind it. Parameters and
    batches stay whatever a phase does, but for those of ``units``.
    """

    def __init__(self, function: GraphFunction, units: Units) -> None:
        """Read the phase in the order in which it stands."""
        nodes = list(function.graph.nodes)
        pairs = list(zip(function.outputs, function.results, strict=True))
        kept = [node for port, node in pairs if port.kind != GRAD and node is not None]
        self._order = {node: index for index, node in enumerate(nodes)}
        self._sizes: dict[Storage, int] = {}
        self._units: dict[Storage, Storage] = {}  # of a parameter: what stands for its unit
        self._add_inputs(function, units.gathered)
        given = [s for s in self._sizes if s not in self._units]
        self._buckets: dict[Node, Storage] = {}  # of a gradient
        self._add_buckets(pairs, units.reduced)
        self._touched: dict[Node, list[Storage]] = {}
        self._begins = dict.fromkeys(given, -1)
        self._ends: dict[Storage, int] = {}
        for node in nodes[len(function.placeholders) :]:
            self._touch(node, kept if node.op == "output" else (node, *node.all_input_nodes))
        self._before: dict[Node, int] = {}  # bytes alive before a node
        calls = nodes[len(function.placeholders) :]
        self._walk(calls, sum(map(self._sizes.__getitem__, given)), self._before)
        grads = [self._order[n] for port, n in pairs if port.kind == GRAD and n in self._before]
        first = min(grads, default=self._order[calls[0]])
        self.peak = self._walk(nodes[first:], self._before[nodes[first]])

    def fits(self, nodes: Sequence[Node]) -> bool:
        """Tell whether nodes may run in this order within the peak; they stood side by side.

        A collective among them is under way as long as they run: what it sends stays.
        """
        begin, end = (pick(nodes, key=self._order.__getitem__) for pick in (min, max))
        if self._order[end] - self._order[begin] >= len(nodes):
            return False  # others stood among them: what is alive then isn't known
        sent = [s for node in nodes if node.target in STARTS for s in storages(node.args[0])]
        alive, limit = self._before[begin], self.peak
        if self._buckets:  # when they are sent isn't known yet: no moment may need more than it did
            limit = self._walk(sorted(nodes, key=self._order.__getitem__), alive)
        return self._walk(nodes, alive, sent=sent) <= limit

    def _add_inputs(self, function: GraphFunction, units: Mapping[str, str]) -> None:
        """Note the sizes of inputs that come or go within the phase."""
        first: dict[str, Storage] = {}
        for port, node in zip(function.inputs, function.placeholders, strict=True):
            if port.kind in (SAVED, BOUNDARY, TANGENT):
                self._sizes |= {(node, leaf): size for leaf, size in leaves(node)}
            elif port.kind == PARAM and port.name in units:
                whole = first.setdefault(units[port.name], (node, 0))
                self._units[node, 0] = whole
                self._sizes[whole] = self._sizes.get(whole, 0) + tensor_bytes(node)

    def _add_buckets(
        self, results: Iterable[tuple[Port, Node | None]], units: Mapping[str, str]
    ) -> None:
        """Note the sizes of the buckets that gradients are written into."""
        first: dict[str, Storage] = {}
        for port, node in results:
            if port.kind == GRAD and port.name in units and node is not None:
                bucket = first.setdefault(units[port.name], (node, BUCKET))
                self._buckets[node] = bucket
                self._sizes[bucket] = self._sizes.get(bucket, 0) + tensor_bytes(node)

    def _touch(self, node: Node, values: Iterable[Node]) -> None:
        held = [s for value in values for s in storages(value)]
        held += [self._buckets[node]] if node in self._buckets else []
        held = self._touched[node] = [self._units.get(s, s) for s in held]
        self._ends |= dict.fromkeys(held, self._order[node])
        for storage in held:
            self._begins.setdefault(storage, self._order[node])
        if node.op == "call_function" and (node, 0) in held:
            self._sizes |= {(node, leaf): size for leaf, size in leaves(node)}

    def _walk(
        self,
        nodes: Sequence[Node],
        alive: int,
        before: dict[Node, int] | None = None,
        sent: Sequence[Storage] = (),
    ) -> int:
        """Return the most bytes alive while ``nodes`` run, from ``alive`` on.

        What is ``sent`` lives as long as they all run; ``before`` takes what is alive before each.
        """
        peak, begin = alive, min(map(self._order.__getitem__, nodes))
        dying, seen = self._dying(nodes, sent), set[Storage]()
        for node in nodes:
            if before is not None:
                before[node] = alive
            made = {s for s in self._touched[node] if self._begins[s] >= begin} - seen
            seen |= made
            alive += sum(self._sizes.get(storage, 0) for storage in made)
            peak = max(peak, alive)
            alive -= sum(self._sizes.get(storage, 0) for storage in dying.get(node, ()))
        return peak

    def _dying(self, nodes: Sequence[Node], sent: Sequence[Storage]) -> dict[Node, list[Storage]]:
        """Return what dies after which node."""
        end, last = max(map(self._order.__getitem__, nodes)), dict[Storage, Node]()
        for node in nodes:
            last |= dict.fromkeys(self._touched[node], node)
        last |= dict.fromkeys((self._units.get(s, s) for s in sent), nodes[-1])
        found: dict[Node, list[Storage]] = {}
        for storage, node in last.items():
            if self._ends[storage] <= end:
                found.setdefault(node, []).append(storage)
        return found
