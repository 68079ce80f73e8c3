"""Values of a program as JSON and back, without pickle: reading them builds data, runs no code.

JSON's own values stand for themselves, a list is a list. All else is an object of one key that says
what it is, from a closed table: ``{"t": [...]}`` a tuple, ``{"n": 3}`` node 3 of its graph,
``{"dtype": "float32"}``, ``{"Shard": [0, {"t": []}]}`` a dataclass by its fields.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable

import torch
from torch.fx import Node

from autoshard.diagnostics import AutoshardError, Diagnostic, Label, Remark, Severity
from autoshard.ir.compare import CompareReport
from autoshard.ir.graph_function import Port
from autoshard.ir.node_info import NodeInfo
from autoshard.ir.params import Copies, Flat, ParamSpec, Whole
from autoshard.ir.placement import Partial, Replicate, Shard
from autoshard.ir.precision import Precision
from autoshard.ir.program import BatchLeaf, Bucket, JournalEntry
from autoshard.mesh import Axis, Mesh
from autoshard.source import Source, Span

# The dataclasses that a program, or an error about it, is made of.
RECORDS = {
    record.__name__: record
    for record in (
        *(Axis, Mesh, Source, Span, Remark, JournalEntry, BatchLeaf, Bucket, Port, NodeInfo),
        *(ParamSpec, Whole, Flat, Copies, Replicate, Shard, Partial, Precision, CompareReport),
        *(Diagnostic, Label),
    )
}
# torch's constants by the class that has them; each prints as "torch.NAME".
CONSTANTS = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
_PLAIN = (str, int, float, bool, type(None))
_GETITEM = "getitem"


class SaveError(AutoshardError):
    """Report a program that has no saved form, or bytes that are none."""


class Encoder:
    """Turns values into JSON's; equal records are written once, in ``table``."""

    def __init__(self) -> None:
        self.table: list[object] = []  # of records that many nodes share
        self._places: dict[object, int] = {}
        self.order: dict[Node, int] = {}  # of the graph at hand

    def shared(self, key: object, value: Callable[[], object]) -> int:
        """Return the place in the table of what ``key`` stands for; ``value()`` is made once."""
        if key not in self._places:
            made = value()
            self._places[key] = len(self.table)
            self.table.append(made)
        return self._places[key]

    def value(self, value: object) -> object:
        """Return any value that a program holds."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Node):
            return {"n": self.order[value]}
        if kind is tuple:
            return {"t": [self.value(item) for item in value]}
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {"m": [[self.value(k), self.value(v)] for k, v in value.items()]}
        if kind is Source:  # the text of a plan: as often as spans point into it
            text = value
            return {"s": self.shared(text, lambda: {"Source": [text.name, text.text]})}
        if kind is Severity:
            return {"severity": value.value}
        if kind.__name__ in RECORDS and RECORDS[kind.__name__] is kind:
            fields = dataclasses.fields(kind)
            return {kind.__name__: [self.value(getattr(value, f.name)) for f in fields]}
        return self._of_torch(value)

    def target(self, target: object) -> str:
        """Return the name of an operator."""
        if target is operator.getitem:
            return _GETITEM
        if isinstance(target, torch._ops.OpOverload):
            return str(target)
        raise SaveError(f"an operator that has no name of torch's has no saved form: {target}")

    def _of_torch(self, value: object) -> object:
        if isinstance(value, torch.device):
            return {"device": str(value)}
        for name, kind in CONSTANTS.items():
            if isinstance(value, kind):
                return {name: str(value).removeprefix("torch.")}
        raise SaveError(f"a value of type '{type(value).__name__}' has no saved form")


class Decoder:
    """Turns JSON's values back; whatever is no saved form raises SaveError."""

    def __init__(self, table: list[object]) -> None:
        self.nodes: list[Node] = []  # of the graph at hand
        self._targets: dict[str, object] = {}
        self._table: list[object] = []
        for item in table:
            self._table.append(self.value(item))

    def shared(self, place: int) -> object:
        """Return what stands in the table at ``place``."""
        return self._table[place]

    def value(self, saved: object) -> object:
        """Return the value that ``saved`` stands for."""
        if isinstance(saved, list):
            return [self.value(item) for item in saved]
        if not isinstance(saved, dict):
            return saved
        ((kind, held),) = saved.items()
        if kind == "n":
            return self.nodes[held]
        if kind == "t":
            return tuple(self.value(item) for item in held)
        if kind == "m":
            return {self.value(k): self.value(v) for k, v in held}
        if kind == "s":
            return self._table[held]
        if kind == "severity":
            return Severity(held)
        if kind in RECORDS:
            return RECORDS[kind](*map(self.value, held))
        return self._of_torch(kind, held)

    def target(self, name: str) -> object:
        """Return the operator of that name."""
        if name not in self._targets:
            self._targets[name] = operator.getitem if name == _GETITEM else _overload(name)
        return self._targets[name]

    def _of_torch(self, kind: str, name: str) -> object:
        if kind == "device":
            return torch.device(name)
        found = getattr(torch, name, None) if kind in CONSTANTS else None
        if not isinstance(found, CONSTANTS.get(kind, ())):
            raise SaveError(f"'{kind}: {name}' is no saved value")
        return found


def _overload(name: str) -> object:
    parts = name.split(".")
    found: object = torch.ops
    for part in parts:
        found = getattr(found, part, None)
    if len(parts) != 3 or not isinstance(found, torch._ops.OpOverload):
        raise SaveError(
            f"there is no operator '{name}'", help="import the package that defines it first"
        )
    return found
