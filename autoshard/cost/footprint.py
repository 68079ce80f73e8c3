"""What running one graph allocates and frees, node by node, as generated code does it.

Views share their base's storage. Collectives need buffers of their own: those of our gloo
transport are counted here (see `runtime.gloo`); NCCL's are of the same sizes.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from autoshard.cost.peak import ACTIVATIONS, COMMUNICATION, GATHERED
from autoshard.ir.aliases import is_view
from autoshard.ir.buckets import uncast
from autoshard.ir.graph_function import FLAT, GraphFunction, Port
from autoshard.ir.lifetimes import lifetimes
from autoshard.ir.node_info import info
from autoshard.mesh import Mesh
from autoshard.ops import collectives as ops
from autoshard.ops.communicator import DIRECT_BYTES

Storage = tuple[Node, int]  # a node and which of its results
EXTRA = -1  # stands for the buffers that a collective needs besides its result
_REDUCTIONS = (ops.all_reduce, ops.all_reduce_within, ops.tied_all_reduce, ops.all_reduce_start)
_SCATTERS = (ops.reduce_scatter, ops.reduce_scatter_start)
_GATHERS = (ops.all_gather, ops.all_gather_start)


@dataclass
class Step:
    """One node: what it makes, what else it needs while it runs, gives away, and frees."""

    name: str
    makes: list[tuple[Storage, int, str]] = field(default_factory=list)  # (what, bytes, category)
    needs: int = 0  # bytes of communication buffers that are gone when it is done
    gives: tuple[Port, ...] = ()
    frees: list[Storage] = field(default_factory=list)


@dataclass(frozen=True)
class Footprint:
    """The steps of a graph; inputs and outputs are storages, None where an output has no value."""

    steps: tuple[Step, ...]
    inputs: tuple[tuple[Port, Storage, int], ...]
    outputs: tuple[tuple[Port, Storage | None], ...]


def footprint(
    function: GraphFunction, mesh: Mesh, fetched: frozenset[str] = frozenset()
) -> Footprint:
    """Return what running ``function`` allocates and frees.

    Gathers of ``fetched`` buckets first copy the rank's part from host memory.
    """
    return _Reader(function, mesh, fetched).read()


class _Reader:
    def __init__(self, function: GraphFunction, mesh: Mesh, fetched: frozenset[str]) -> None:
        self._function, self._mesh = function, mesh
        flats = function.named(FLAT).items()
        self._flats = {node for _, node in flats}
        self._fetched = {node for name, node in flats if name in fetched}
        self._order = {node: index for index, node in enumerate(function.graph.nodes)}
        self._lives = lifetimes(function)
        self._given = set(self._lives.handed)

    def read(self) -> Footprint:
        function, deaths = self._function, self._deaths()
        steps = [self._step(node) for node in function.graph.nodes]
        for storage, index in deaths.items():
            if index < len(steps):
                steps[index].frees.append(storage)
        inputs = tuple(
            (port, (node, 0), _nbytes(node.meta["val"]))
            for port, node in zip(function.inputs, function.placeholders, strict=True)
        )
        outputs = tuple(
            (port, None if node is None or node in self._given else storages(node)[0])
            for port, node in zip(function.outputs, function.results, strict=True)
        )
        return Footprint(tuple(steps), inputs, outputs)

    def _step(self, node: Node) -> Step:
        step = Step(_describe(node), gives=tuple(self._lives.handed.get(node, ())))
        if node.op == "call_function" and node.target is not ops.pack:
            self._make(node, step)
        for write in self._lives.writes.get(node, ()):
            if write.is_first:
                nbytes = _nbytes(write.bucket.meta["val"])
                step.makes.append(((write.bucket, 0), nbytes, ACTIVATIONS))
        return step

    def _make(self, node: Node, step: Step) -> None:
        own = [(leaf, size) for leaf, size in leaves(node) if _base(node) is node]
        category = ACTIVATIONS
        if node.target in _GATHERS:
            category = GATHERED if uncast(node.args[0]) in self._flats else ACTIVATIONS
            step.needs = self._unpacking(node) + self._fetching(node)
        elif node.target in (*_REDUCTIONS, *_SCATTERS) and self._ranks(node) > 1:
            category, step.needs = COMMUNICATION, self._buffers(node)
        step.makes += [((node, leaf), size, category) for leaf, size in own]
        if node.target in ops.STARTS and step.needs:  # they are there until the wait
            step.makes.append(((node, EXTRA), step.needs, category))
            step.needs = 0

    def _unpacking(self, node: Node) -> int:
        """Return what a gather needs besides its result: the parts, unless they are the result."""
        dim, blocks = node.args[1:3]
        return 0 if dim == 0 and len(blocks) < 2 else _nbytes(node.meta["val"])

    def _fetching(self, node: Node) -> int:
        """Return the bytes of a part that lies in host memory: its copy on the device."""
        part = node.args[0]
        return _nbytes(part.meta["val"]) if part in self._fetched else 0

    def _buffers(self, node: Node) -> int:
        """Return what a reduction needs besides the buffer that its result is summed in."""
        count, result = self._ranks(node), _nbytes(node.meta["val"])
        if node.target in _SCATTERS:
            return (count - 2) * result
        if count == 2 or result <= DIRECT_BYTES:
            return (count - 2) * result
        return result + (count - 1) * result // count  # a padded copy, and the parts of others

    def _ranks(self, node: Node) -> int:
        if node.target is ops.all_reduce_within:
            return node.args[1]
        if node.target is ops.tied_all_reduce:
            return len(node.args[2])
        axis = node.args[1] if node.target in _REDUCTIONS else node.args[3]
        return self._mesh.size(axis)

    def _deaths(self) -> dict[Storage, int]:
        """Return after which node each storage has no name any more; the end for what is kept."""
        end = len(self._order)
        dies = {value: self._order[at] for at, found in self._lives.dies.items() for value in found}
        kept = {n for n in self._function.results if n is not None and n not in self._given}
        deaths: dict[Storage, int] = defaultdict(int)
        for node, index in self._order.items():
            if node.op == "output":
                continue
            last = end if node in kept else dies.get(node, index)
            for storage in storages(node):
                deaths[storage] = max(deaths[storage], last)
            if node.target in ops.STARTS:  # the input is being sent until the wait
                (wait,) = node.users
                for storage in (*storages(node.args[0]), (node, EXTRA)):
                    deaths[storage] = max(deaths[storage], self._order[wait])
        return deaths


def _describe(node: Node) -> str:
    name, path = getattr(node.target, "__name__", node.name), info(node).path
    name = name.removesuffix(".default")
    return f"{name} of {path}" if path else name


def _base(node: Node) -> Node:
    """Return the node that allocated what ``node`` names."""
    while is_view(node) or node.target in (ops.wait, ops.copy_to, ops.copy_within):
        node = node.args[0]
    return node


def storages(node: Node) -> list[Storage]:
    """Return what holds the bytes of a node's value: one storage for each tensor of its base."""
    base = _base(node)
    if base.target is operator.getitem:
        return [(base.args[0], base.args[1])]
    return [(base, leaf) for leaf, _ in leaves(base)]


def leaves(node: Node) -> list[tuple[int, int]]:
    """Return (place, bytes) of the tensors that a node itself allocates."""
    if node.target is operator.getitem:
        return []
    values = enumerate(pytree.tree_leaves(node.meta.get("val")))
    return [(place, _nbytes(v)) for place, v in values if isinstance(v, torch.Tensor)]


def _nbytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()
