"""Reads the nodes of a graph as terms, each by the reading of its operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from autoshard.ir.node_info import info, val
from autoshard.ir.rules import pointwise
from autoshard.ir.rules.call import Shape, bound_arguments
from autoshard.ops.library import NAMESPACE
from autoshard.proof.terms import Terms

Value = int | tuple[int, ...] | None
Reading = Callable[["Reader", Node], Value]
# Arguments that are sizes: the global shape of the result says the same.
_SIZES = """
    size shape sizes split_sizes split_size input_sizes self_size output_size num_weights repeats
"""
SIZES = frozenset(_SIZES.split())
# What says how numbers are held or laid out, not which ones.
_LAYOUT = """
    dtype layout device pin_memory memory_format non_blocking implicit half_to_float input_dtype
    copy
"""
LAYOUT = frozenset(_LAYOUT.split())


@dataclass(frozen=True)
class Maker:
    """The node that a term was first read from, the module it belongs to, and its graph."""

    node: Node
    path: str
    place: str


@dataclass
class Reader:
    """Reads the nodes of one side; ``shapes`` gives global shapes, None where not known."""

    terms: Terms
    shapes: Callable[[Node], tuple[Shape | None, ...]]
    readings: Mapping[object, Reading]  # by operator; any other is read as it is called
    factor: Callable[[Node, int], int] = lambda node, dim: 1  # global over local extent of a dim
    env: dict[Node, Value] = field(default_factory=dict)
    makers: dict[int, Maker] = field(default_factory=dict)  # who made each term first
    unread: dict[str, int] = field(default_factory=dict)  # operators that nothing here reads
    used: set[str] = field(default_factory=set)  # named rewrites that were applied
    renamed: tuple[str, str] = ("", "")  # a layer that is read, and its twin that is meant
    place: str = "plain model"  # which graph is being read

    def run(self, nodes: Iterable[Node]) -> None:
        """Read every call whose inputs are known and that was not read yet."""
        for node in nodes:
            if node.op != "call_function" or node in self.env:
                continue
            if all(source in self.env for source in node.all_input_nodes):
                self.env[node] = value = self._read(node)
                for number in value if isinstance(value, tuple) else (value,):
                    self.makers.setdefault(number, Maker(node, self._path(node), self.place))

    def _read(self, node: Node) -> Value:
        reading = self.readings.get(node.target)
        value = reading(self, node) if reading else None
        return self.generic(node) if value is None else value

    def generic(self, node: Node) -> Value:
        """Return the operator applied to its inputs as it is called, sizes made global."""
        if getattr(node.target, "namespace", "") == NAMESPACE:
            name = str(node.target)
            self.unread[name] = self.unread.get(name, 0) + 1
        children: list[int] = []
        attrs: list[object] = []
        repeats = node.target in pointwise.TABLE and len(node.all_input_nodes) > 1
        after = self.shape(node) if repeats else None
        for name, value in bound_arguments(node).items():
            if name in SIZES or name in LAYOUT:
                continue
            if after is not None and isinstance(value, Node):
                children.append(self.broadcast(value, after))
                value = "%"
            attrs.append((name, self._argument(value, children)))
        if node.target not in pointwise.TABLE:
            attrs += [self.shapes(source) for source in node.all_input_nodes]
            attrs.append(self.shapes(node))
        number = self.terms.make(str(node.target), children, *attrs)
        if not isinstance(val(node), (tuple, list)):
            return number
        return tuple(self.terms.make("item", (number,), i) for i in range(len(val(node))))

    def broadcast(self, node: Node, after: Shape | None) -> int:
        """Return an operand of an elementwise operator whose result has a shape."""
        return broadcast(self.terms, self.env[node], self.shape(node), after)

    def call(self, op: object, *given: object) -> int:
        """Return the term of a pointwise operator as ``generic`` reads a call of it.

        A tensor is given as its term; what is not given has its default.
        """
        children: list[Any] = []
        attrs: list[object] = []
        for place, argument in enumerate(op._schema.arguments):
            value = given[place] if place < len(given) else argument.default_value
            is_tensor = str(argument.type) == "Tensor"
            children += [value] if is_tensor else []
            attrs.append((argument.name, "%" if is_tensor else value))
        return self.terms.make(str(op), children, *attrs)

    def _path(self, node: Node) -> str:
        read, meant = self.renamed
        path = info(node).path
        return meant + path[len(read) :] if read and path.startswith(read) else path

    def _argument(self, value: object, children: list[int]) -> object:
        if isinstance(value, Node):
            children.append(self.env[value])
            return "%"
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(item, children) for item in value)
        return value

    def shape(self, node: Node) -> Shape | None:
        """Return the global shape of a node's one value."""
        return self.shapes(node)[0]


def broadcast(terms: Terms, x: int, before: Shape | None, after: Shape | None) -> int:
    """Return a value that is repeated to a shape, told by which extents are new.

    A value itself stands for one without new extents, a number for all elements, and what has one
    element for each row for all elements of the row.
    """
    new = new_extents(before, after)
    return terms.make("broadcast", (x,), new) if new else x


def new_extents(before: Shape | None, after: Shape | None) -> tuple[object, ...]:
    """Return the runs of kept and new extents, nothing where ``broadcast`` needs no word of it."""
    if before is None or after is None:
        return () if before == after else ("unknown",)
    padded = (1,) * (len(after) - len(before)) + tuple(before)
    runs = _runs(after, {dim for dim, extent in enumerate(padded) if extent == 1})
    told = [is_new for is_new, _ in runs]
    return () if told in ([], [False], [True], [False, True]) else runs


def reduction(terms: Terms, op: str, x: int, shape: Shape | None, dims: Iterable[int]) -> int:
    """Return a reduction told by which extents go and which stay, however they are grouped."""
    if shape is None:
        return terms.make(op, (x,), None)
    return terms.make(op, (x,), _runs(shape, set(dims)))


def _runs(shape: Shape, marked: set[int]) -> tuple[tuple[bool, int], ...]:
    """Return whether neighbouring dims are marked, with their extent together; ones left out."""
    runs: list[tuple[bool, int]] = []
    for dim, extent in enumerate(shape):
        if extent == 1:
            continue
        if runs and runs[-1][0] == (dim in marked):
            runs[-1] = (runs[-1][0], runs[-1][1] * extent)
        else:
            runs.append((dim in marked, extent))
    return tuple(runs)
