"""A lowered program as bytes: for the cache on disk, and for ranks that did not compile.

    from_bytes(to_bytes(program))  # the same graphs, parameters, schedule: the same training

The form is JSON, compressed, then the bytes of constants; nothing in it is code. It holds what
running and printing need. What it does not hold is the model: no parameter's value, no Python of
the user's. Fake values come back in a mode of their own.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from autoshard.compat import FakeTensor, FakeTensorMode
from autoshard.ir.graph_function import GraphFunction, Port
from autoshard.ir.node_info import NodeInfo, info, set_info
from autoshard.ir.params import ParamTable
from autoshard.ir.program import Level, Program, Stage
from autoshard.ir.save_values import Decoder, Encoder, SaveError
from autoshard.schedule import Schedule

_LENGTH = 8  # bytes of the length that the text begins with
_LEVEL = 1  # of compression: ten times smaller, in a hundredth of the time that compiling takes
_AS_THEY_ARE = ("mesh", "leaves", "training", "num_microbatches", "buckets", "kernels")
_AS_THEY_ARE += ("compiler", "precision", "compared", "journal")
_OWN = frozenset({"aten", "prim", "prims", "autoshard"})  # operators of torch's and our versions
_OPS = {"placeholder": 0, "call_function": 1, "output": 2}


def to_bytes(program: Program) -> bytes:
    """Return the saved form of a program whose stages are lowered; raises SaveError."""
    if program.level is not Level.SCHEDULE:
        raise SaveError("a program that has not come down to its phases has no saved form")
    writer = Encoder()
    said = {name: writer.value(getattr(program, name)) for name in _AS_THEY_ARE}
    said["holds"] = sorted(program.holds)
    said["level"] = int(program.level)
    said["schedule"] = None if program.schedule is None else str(program.schedule)
    said["params"] = [writer.value(spec) for spec in program.params]
    said["graphs"] = [[name, *_graph(writer, f)] for name, f in program.functions()]
    said["stages"] = len(program.stages)
    said["constants"], flat = _flat(writer, program.constants)
    said["table"] = writer.table
    text = zlib.compress(json.dumps(said, separators=(",", ":")).encode(), _LEVEL)
    return b"".join([len(text).to_bytes(_LENGTH, "big"), text, *flat])


def captured_bytes(program: Program) -> bytes:
    """Return all that a captured program is: of equal bytes, passes make equal programs.

    Raises SaveError where a part of it can't be told: an operator of a library that is not ours or
    torch's, whose gradient is code that no graph shows.
    """
    if program.forward is None:
        raise SaveError("a program whose forward graph was cut already is no capture")
    writer = Encoder()
    for node in program.forward.graph.nodes:
        _refuse_foreign(node.target)
    said: dict[str, object] = {"leaves": writer.value(program.leaves)}
    said["training"] = program.training
    said["params"] = [writer.value(spec) for spec in program.params]
    said["forward"] = _graph(writer, program.forward)
    said["constants"], flat = _flat(writer, program.constants)
    said["table"] = writer.table
    return b"\n".join([json.dumps(said).encode(), *flat])


def _refuse_foreign(target: object) -> None:
    if isinstance(target, torch._ops.OpOverload) and target.namespace not in _OWN:
        raise SaveError(f"`{target}` is a library's operator, whose code no graph shows")


def _flat(writer: Encoder, constants: Mapping[str, torch.Tensor]) -> tuple[list, list[bytes]]:
    """Return what constants are like, and their bytes."""
    flat, described = [], []
    for name, constant in constants.items():
        value = constant.detach().cpu().clone(memory_format=torch.preserve_format)
        flat.append(value.as_strided((value.numel(),), (1,)).view(torch.uint8).numpy().tobytes())
        described.append([name, writer.value(value.dtype), [*value.shape], [*value.stride()]])
    return described, flat


def from_bytes(raw: bytes) -> Program:
    """Return the program whose saved form ``raw`` is; raises SaveError for any other bytes."""
    try:
        return _read(raw)
    except SaveError:
        raise
    except Exception as error:  # bytes of any other origin fail in any way
        raise SaveError(
            f"these bytes are no saved program: {type(error).__name__}: {error}"
        ) from error


def _read(raw: bytes) -> Program:
    end = _LENGTH + int.from_bytes(raw[:_LENGTH], "big")
    said = json.loads(zlib.decompress(raw[_LENGTH:end]))
    reader = _Reader(said["table"])
    given = {name: reader.value(said[name]) for name in _AS_THEY_ARE}
    program = Program(**given, params=ParamTable(tuple(map(reader.value, said["params"]))))
    program.holds, program.level = set(said["holds"]), Level(said["level"])
    program.schedule = None if said["schedule"] is None else Schedule.parse(said["schedule"])
    program.constants = _constants(reader, said["constants"], raw[end:])
    program.stages = [Stage(index, _EMPTY) for index in range(said["stages"])]
    for name, *graph in said["graphs"]:
        _place(program, name, reader.graph(*graph))
    return program


_EMPTY = GraphFunction(Graph(), (), ())  # a lowered stage is run by its phases alone


def _place(program: Program, name: str, function: GraphFunction) -> None:
    """Put a graph where ``Program.functions`` found it."""
    if name == "prelude":
        program.prelude = function
        return
    stage, phase = name.removeprefix("stage").split(".")
    program.stages[int(stage)].phases[phase] = function


def _constants(reader: _Reader, described: list, raw: bytes) -> dict[str, torch.Tensor]:
    found, start, held = {}, 0, bytearray(raw)  # torch wants to be able to write
    for name, dtype, shape, stride in described:
        kind, length = reader.value(dtype), 1
        for extent in shape:
            length *= extent
        flat = torch.empty(0, dtype=kind)
        if length:
            flat = torch.frombuffer(held, dtype=kind, count=length, offset=start).clone()
        found[name] = flat.as_strided(shape, stride)
        start += length * kind.itemsize
    return found


def _graph(writer: Encoder, function: GraphFunction) -> list[object]:
    """Return ports and nodes, a node as [kind, name, value, record, target, args, kwargs]."""
    rows = []
    writer.order = {node: place for place, node in enumerate(function.graph.nodes)}
    for node in writer.order:
        row = [_OPS.get(node.op), node.name, _fake(writer, node.meta.get("val"))]
        if row[0] is None:
            raise SaveError(f"%{node.name} is a node of kind '{node.op}', which has no saved form")
        row.append(_record(writer, info(node)))
        if node.op == "call_function":
            row.append(writer.target(node.target))
        if node.op != "placeholder":
            row.append(writer.value(node.args))
        if node.kwargs:
            row.append(writer.value(node.kwargs))
        rows.append(row)
    return [_ports(function.inputs), _ports(function.outputs), rows]


def _ports(ports: tuple[Port, ...]) -> list[list[str]]:
    return [[port.kind, port.name] for port in ports]


def _record(writer: Encoder, record: NodeInfo) -> int:
    said = (*vars(record).values(),)
    key = ("record", *(tuple(s.items()) if isinstance(s, dict) else s for s in said))
    return writer.shared(key, lambda: writer.value(record))


def _fake(writer: Encoder, value: object) -> object:
    """Return a node's fake value: one of the table, or a list of them."""
    if isinstance(value, FakeTensor):
        if value.constant is not None:
            raise SaveError("a fake value whose elements are known has no saved form")
        said = [value.dtype, tuple(value.shape), value.stride(), value.storage_offset()]
        said += [value.device, value.requires_grad]
        key = ("fake", *said)
        return writer.shared(key, lambda: writer.value(tuple(said)))
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(_fake(writer, item) for item in value)]
    if value is None:
        return None
    raise SaveError(f"a value of type '{type(value).__name__}' has no saved form")


class _Reader(Decoder):
    """Reads graphs as well; all fake values are of one mode."""

    def __init__(self, table: list[object]) -> None:
        super().__init__(table)
        self._mode = FakeTensorMode()
        self._fakes: dict[int, torch.Tensor] = {}

    def graph(self, inputs: list, outputs: list, rows: list) -> GraphFunction:
        graph, self.nodes = Graph(), []
        for row in rows:
            node = self._node(graph, *row)
            self.nodes.append(node)
        return GraphFunction(
            graph,
            tuple(Port(*port) for port in inputs),
            tuple(Port(*port) for port in outputs),
        )

    def _node(
        self, graph: Graph, op: int, name: str, val: object, record: int, *rest: object
    ) -> Node:
        if op == _OPS["placeholder"]:
            node = graph.placeholder(name)
        elif op == _OPS["output"]:
            node = graph.output(self.value(rest[0])[0])
        else:
            target, args = self.target(rest[0]), self.value(rest[1])
            kwargs = self.value(rest[2]) if rest[2:] else {}
            node = graph.create_node("call_function", target, args, kwargs, name)
        if node.name != name:
            node._rename(name)
        if val is not None:
            node.meta["val"] = self._fake(val)
        set_info(node, self.shared(record))
        return node

    def _fake(self, saved: object) -> object:
        if isinstance(saved, list):
            items = [None if item is None else self._fake(item) for item in saved[1:]]
            return tuple(items) if saved[0] == "tuple" else items
        if saved not in self._fakes:
            self._fakes[saved] = _make_fake(self._mode, *self.shared(saved))
        return self._fakes[saved]


def _make_fake(
    mode: FakeTensorMode,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    device: torch.device,
    requires_grad: bool,
) -> torch.Tensor:
    with mode:
        value = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        if offset:
            reach = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n)
            whole = torch.empty(reach, dtype=dtype, device=device)
            value = whole.as_strided(shape, stride, offset)
    return value.requires_grad_() if requires_grad else value
