"""What a placement rule sees and says: one call of one operator, along one mesh axis.

A rule is a function ``rule(call, ins) -> Choice``. ``ins`` holds the placement of every tensor
input. The choice says what each input must be converted to (``wants``), and how the outputs lie
then (``outs``). ``wants == ins`` means that the operator runs on the local parts as it stands.

Shapes are *global* along the axis; a rule takes sizes from ``call.shapes`` and ``call.outs``, never
from literal arguments, so that it also reads graphs whose literals are local already.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from torch._ops import OpOverload
from torch.fx import Node

from autoshard.ir.placement import REPLICATE, Placement
from autoshard.mesh import covers, is_data_parallel

aten = torch.ops.aten
# What keeps 0, 1, 2 ... as it is, but for dims of size 1.
_KEEPS_COUNTING = (aten.unsqueeze.default, aten.reshape.default, aten._to_copy.default)
_LOOKUPS = (aten.index.Tensor, aten.index_put.default)
_ZEROS = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)
_FILLED = (aten.full.default, aten.new_full.default, aten.full_like.default)
Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorRef:
    """Stand for tensor input number ``index`` among the arguments of a call."""

    index: int


@dataclass(frozen=True)
class Call:
    """One operator call: its arguments by name, the shapes around it, the ranks of the axis."""

    op: object
    arguments: Mapping[str, object] = field(hash=False)
    shapes: tuple[Shape, ...]  # of the tensor inputs
    outs: tuple[Shape, ...]  # of the tensor outputs
    size: int  # what a split dimension must be divisible by
    axis: str = "tp"  # the mesh axis that is asked about
    iotas: frozenset[int] = frozenset()  # inputs that count 0, 1, ... along their one long dim
    zeros: frozenset[int] = frozenset()  # inputs that were made as zeros: a partial sum of nothing

    def __getitem__(self, name: str) -> object:
        return self.arguments[name]

    @property
    def is_along(self) -> bool:
        """Tell whether an operator with an axis of its own works along the one asked about."""
        return covers(self["axis"], self.axis)

    def index(self, name: str) -> int | None:
        """Return which tensor input the argument ``name`` is, or None when it is absent."""
        value = self.arguments.get(name)
        return value.index if isinstance(value, TensorRef) else None

    def dim(self, name: str = "dim", of: int = 0) -> int:
        """Return a dimension argument counted from the front of input ``of``."""
        return self.arguments[name] % max(len(self.shapes[of]), 1)

    def dims(self, name: str = "dim", of: int = 0) -> tuple[int, ...]:
        """Return a list of dimensions counted from the front; absent or empty means all."""
        rank = len(self.shapes[of])
        given = self.arguments.get(name)
        given = [given] if isinstance(given, int) else given
        return tuple(d % max(rank, 1) for d in given) if given else tuple(range(rank))


@dataclass(frozen=True)
class Choice:
    """What a rule decided.

    ``instead`` names another form of the operator that must replace it first; ``refusal`` names
    the reason why a shard was given up; ``uniform`` lists dims along which the (replicated) output
    is constant, so that it may as well be made in its local size there.
    """

    wants: tuple[Placement, ...]
    outs: tuple[Placement, ...]
    instead: str = ""
    refusal: str = ""
    uniform: tuple[int, ...] = ()
    proven: bool = True


Rule = Callable[[Call, tuple[Placement, ...]], Choice]


def replicate(call: Call, **reasons: object) -> Choice:
    """Return the choice that is always right: gather everything."""
    return Choice((REPLICATE,) * len(call.shapes), (REPLICATE,) * len(call.outs), **reasons)


def keep(call: Call, ins: tuple[Placement, ...], out: Placement, **reasons: object) -> Choice:
    """Return the choice that runs on the inputs as they lie and gives ``out``."""
    return Choice(tuple(ins), (out,) * len(call.outs), **reasons)


def call_of(
    node: Node,
    size: int,
    shape_of: Callable[[Node], tuple[Shape, ...]] | None = None,
    *,
    axis: str = "tp",
) -> Call:
    """Return the call that ``node`` makes; ``shape_of`` gives shapes other than the fakes'."""
    # Over dp literals are local: an arange of a batch counts this rank's samples.
    iotas = iotas_of(node) if is_data_parallel(axis) else frozenset()
    shape_of = shape_of or shapes_of
    inputs: list[Node] = []
    arguments = {name: _reference(value, inputs) for name, value in bound_arguments(node).items()}
    shapes = tuple(shape_of(n)[0] for n in inputs)
    zeros = frozenset(i for i, n in enumerate(inputs) if _is_zero(n))
    return Call(node.target, arguments, shapes, shape_of(node), size, axis, iotas, zeros)


def tensor_inputs(node: Node) -> tuple[Node, ...]:
    """Return the tensor inputs of a call in the order in which rules number them."""
    inputs: list[Node] = []
    for value in bound_arguments(node).values():
        _reference(value, inputs)
    return tuple(inputs)


def shapes_of(node: Node) -> tuple[Shape, ...]:
    """Return the shape of each tensor that a node computes."""
    value = node.meta["val"]
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(tuple(v.shape) for v in values if isinstance(v, torch.Tensor))


def bound_arguments(node: Node) -> dict[str, object]:
    """Return a node's arguments by the names of its operator's schema, defaults filled in."""
    if node.target is operator.getitem:
        return {"self": node.args[0], "index": node.args[1]}
    bound: dict[str, object] = {}
    for position, (name, by_name_only, default) in enumerate(_arguments(node.target)):
        if position < len(node.args) and not by_name_only:
            bound[name] = node.args[position]
        else:
            bound[name] = node.kwargs.get(name, default)
    return bound


@cache
def _arguments(op: OpOverload) -> tuple[tuple[str, bool, object], ...]:
    """Return name, whether it is given by name only, and default of each argument."""
    found = op._schema.arguments
    return tuple((each.name, each.kwarg_only, each.default_value) for each in found)


def _reference(value: object, inputs: list[Node]) -> object:
    """Replace nodes by references, appending them to ``inputs``, in lists too."""
    if isinstance(value, Node):
        inputs.append(value)
        return TensorRef(len(inputs) - 1)
    if isinstance(value, (list, tuple)):
        return [_reference(item, inputs) for item in value]
    return value


def iotas_of(node: Node) -> frozenset[int]:
    """Return the index inputs of a look-up that count 0, 1, ... along one dimension."""
    if node.target not in _LOOKUPS:
        return frozenset()
    return frozenset(i for i, n in enumerate(tensor_inputs(node)) if i and _counts(n))


def _is_zero(value: Node) -> bool:
    if value.op != "call_function":
        return False
    return value.target in _ZEROS or (value.target in _FILLED and value.args[-1] == 0)


def _counts(value: Node) -> bool:
    if value.op != "call_function":
        return False
    if value.target is aten.arange.default:
        return True
    if value.target is aten.add.Tensor and value.args[1] == 0:
        return _counts(value.args[0])
    if value.target not in _KEEPS_COUNTING:
        return False
    (inner,) = tensor_inputs(value)
    long = [[n for n in shapes_of(v)[0] if n != 1] for v in (inner, value)]
    return long[0] == long[1] and _counts(inner)
