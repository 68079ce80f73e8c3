"""The canonical print of a graph: names from module paths, types, placements, the user's line.

    h.0.attn.qkv: f32[4, 16, 96] S(2)@tp = linear(h.0.ln_1, h.0.attn.qkv.weight)  # model.py:31
    h.0.attn.proj.all_reduce: f32[4, 16, 32] = all_reduce(h.0.attn.proj, "tp")  <== tp 8.0 KiB

The only computing node of a module bears the module's name, others add their operator's; a prime
marks backward. Names of fx nodes, ids, addresses and ranks never appear, so two captures of one
model print alike. Equal blocks are printed once with their number, by a hash of their structure.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter

import torch
from torch.fx import Node

from autoshard.ir.communication import node_traffic
from autoshard.ir.graph_function import (
    BUFFER,
    FLAT,
    FLAT_GRAD,
    GRAD,
    PARAM,
    SAVED,
    TANGENT,
    GraphFunction,
    Port,
)
from autoshard.ir.node_info import info
from autoshard.ir.placement import Replicate
from autoshard.ir.print_fold import Line, fold_blocks, skeleton
from autoshard.ir.program import Program
from autoshard.ir.user_line import place_of
from autoshard.ops.library import spec
from autoshard.units import show_bytes

_HIDDEN = ("device", "layout", "pin_memory")  # where a value lies is not the graph's business
_LOW_LEVEL = (FLAT, FLAT_GRAD, GRAD, SAVED, TANGENT)


def print_program(program: Program, *, fold: bool = True) -> str:
    """Return all current graphs of ``program`` and its schedule as text; see print_function."""
    parts = [f"mesh {program.mesh}"]
    axes = used_axes(program)
    for name, function in program.functions():
        parts.append(f"{name}\n{print_function(function, fold=fold, axes=axes)}")
    if program.schedule is not None:
        parts.append(f"schedule\n{program.schedule}")
    return "\n\n".join(parts)


def print_function(
    function: GraphFunction, *, fold: bool = True, axes: frozenset[str] | None = None
) -> str:
    """Return one graph as text, a line a node; placements over ``axes`` (all when None).

    With ``fold`` equal blocks are printed once, and a graph that is past the forward level prints
    as a skeleton: our own operators and what reads parameters, the rest counted.
    """
    lines = _Namer(function, axes).lines()
    if not fold:
        return "\n".join(line.text for line in lines)
    if any(port.kind in _LOW_LEVEL for port in (*function.inputs, *function.outputs)):
        lines = skeleton(lines)
    return "\n".join(fold_blocks(lines))


def function_lines(
    function: GraphFunction, axes: frozenset[str] | None = None
) -> tuple[tuple[str, str], ...]:
    """Return the unfolded print as (module path, line) pairs."""
    return tuple((line.path, line.text) for line in named_lines(function, axes))


def named_lines(function: GraphFunction, axes: frozenset[str] | None = None) -> list[Line]:
    """Return the unfolded print as lines that know their value's name and what they read."""
    return _Namer(function, axes).lines()


def used_axes(program: Program) -> frozenset[str]:
    """Return the mesh axes that have more than one rank: the others say nothing."""
    return frozenset(axis.name for axis in program.mesh.axes if axis.size > 1)


def type_text(value: object) -> str:
    """Return a value's type: ``f32[4, 16]``, or several in parentheses.

    >>> type_text(torch.zeros(2, 3))
    'f32[2, 3]'
    """
    if isinstance(value, torch.Tensor):
        return f"{dtype_text(value.dtype)}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(type_text, value))})"
    return "none" if value is None else type(value).__name__


def dtype_text(dtype: torch.dtype) -> str:
    """Return the short name of a type: f32, bf16, i64, bool."""
    name = str(dtype).removeprefix("torch.")
    if name.startswith("bfloat"):
        return f"bf{name[6:]}"
    match = re.fullmatch(r"(u?)(int|float|complex)(\d+)", name)
    return f"{match[1]}{match[2][0]}{match[3]}" if match else name


class _Namer:
    """Names the values of one graph, and renders its lines."""

    def __init__(self, function: GraphFunction, axes: frozenset[str] | None = None) -> None:
        self.function, self.axes = function, axes
        self.names: dict[Node, str] = {}
        self.held = {port.name for port in function.inputs if port.kind in (PARAM, FLAT)}
        for port, node in zip(function.inputs, function.placeholders, strict=True):
            self.names[node] = _port_name(port)
        self._name_calls()

    def lines(self) -> list[Line]:
        """Return the lines in graph order: inputs, calls, outputs."""
        found = [
            self._input_line(port, node)
            for port, node in zip(self.function.inputs, self.function.placeholders, strict=True)
        ]
        calls = [n for n in self.function.graph.nodes if n.op == "call_function"]
        found += [self._call_line(node) for node in calls if not _is_part(node)]
        pairs = zip(self.function.outputs, self.function.results, strict=True)
        return found + [self._output_line(port, node) for port, node in pairs]

    def _name_calls(self) -> None:
        calls = [n for n in self.function.graph.nodes if n.op == "call_function"]
        alone = Counter(_place(n) for n in calls if not _is_ours(n) and not _is_part(n))
        taken = set(self.names.values())
        for node in calls:
            if _is_part(node):
                self.names[node] = f"{self.names[node.args[0]]}[{node.args[1]}]"
                continue
            path, prime = _place(node)
            is_main = path and not _is_ours(node) and alone[path, prime] == 1
            stem = path if is_main else ".".join(filter(None, (path, op_text(node))))
            marks = itertools.chain(("",), (f"_{count}" for count in itertools.count(2)))
            names = (stem + mark + prime for mark in marks)
            self.names[node] = next(name for name in names if name not in taken)
            taken.add(self.names[node])

    def _input_line(self, port: Port, node: Node) -> Line:
        path = port.name.rpartition(".")[0] if port.kind in (PARAM, BUFFER) else ""
        head = f"{port.kind} {port.name}".strip()
        return Line(path, f"{head}: {self._type(node)}", name=self.names[node])

    def _call_line(self, node: Node) -> Line:
        record = info(node)
        given = ", ".join(self._arguments(node))
        text = f"{self.names[node]}: {self._type(node)} = {op_text(node)}({given})"
        text += "".join(f"  <== {t.axis} {show_bytes(t.nbytes)}" for t in node_traffic(node))
        places = [place_of(record.source)] if record.source else []
        places += [f"plan:{record.span.line}"] if record.span else []
        text += f"  # {' '.join(places)}" if places else ""
        reads = tuple(self.names[n] for n in node.all_input_nodes)
        is_kept = spec(node.target) is not None or any(
            n.op == "placeholder" and self.names[n] in self.held for n in node.all_input_nodes
        )
        return Line(record.path, text, reads, self.names[node], not is_kept)

    def _output_line(self, port: Port, node: Node | None) -> Line:
        name = "none" if node is None else self.names[node]
        path = port.name.rpartition(".")[0] if node is not None else ""
        return Line(path if "grad" in port.kind else "", f"return {port} = {name}", (name,))

    def _type(self, node: Node) -> str:
        placements = info(node).placements
        shown = [
            f"{placement}@{axis}"
            for axis, placement in placements.items()
            if not isinstance(placement, Replicate) and (self.axes is None or axis in self.axes)
        ]
        return " ".join([type_text(node.meta.get("val")), *shown])

    def _arguments(self, node: Node) -> list[str]:
        """Return the arguments as text; our own operators name all but their tensors."""
        names = [""] * len(node.args)
        if spec(node.target) is not None:
            names = [argument.name for argument in node.target._schema.arguments]
        given = [
            self._argument(value) if not name or _is_tensor(value) else self._named(name, value)
            for name, value in zip(names, node.args, strict=False)
            if not name or value not in ([], ())
        ]
        kwargs = node.kwargs.items()
        return given + [self._named(name, v) for name, v in kwargs if name not in _HIDDEN]

    def _named(self, name: str, value: object) -> str:
        return f"{name}={self._argument(value)}"

    def _argument(self, value: object) -> str:
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._argument, value))}]"
        if isinstance(value, torch.dtype):
            return dtype_text(value)
        return f'"{value}"' if isinstance(value, str) else str(value)


def op_text(node: Node) -> str:
    """Return the operator's short name: ``linear``, ``all_reduce``, ``getitem``."""
    if node.target is operator.getitem:
        return "getitem"
    packet = getattr(node.target, "overloadpacket", node.target)
    return getattr(packet, "__name__", str(packet)).strip("_")


def _port_name(port: Port) -> str:
    """Return how a value is called where it is read: parameters by their name alone."""
    if port.kind in (PARAM, BUFFER):
        return port.name
    return f"{port.kind}.{port.name}" if port.name else port.kind


def _place(node: Node) -> tuple[str, str]:
    record = info(node)
    return record.path, "'" if record.phase == "B" else ""


def _is_ours(node: Node) -> bool:
    """Tell whether the node moves values between ranks: it never takes a module's name."""
    ours = spec(node.target)
    return ours is not None and bool(node_traffic(node) or "copy_to" in ours.name)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Node) or (
        isinstance(value, list | tuple) and any(isinstance(item, Node) for item in value)
    )


def _is_part(node: Node) -> bool:
    """Tell whether the node is one output of another that lies as that one does: ``split[1]``."""
    return (
        node.target is operator.getitem
        and isinstance(node.args[1], int)
        and info(node).placements == info(node.args[0]).placements
    )
