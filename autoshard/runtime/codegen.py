"""Turn a graph into straight-line Python: one call a line, every value freed after its last use.

The function takes the communicator and a *boxed* argument list, which it clears, so that a value
that only the list held dies at its last use. Our own operators are bound to their ``run``, ATen
operators are called as overloads; nothing is looked up or interpreted while a step runs.
"""

from __future__ import annotations

import itertools
import keyword
import linecache
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from autoshard.diagnostics import InternalError
from autoshard.ir.graph_function import GraphFunction
from autoshard.ir.lifetimes import Write, lifetimes
from autoshard.ir.node_info import val
from autoshard.ops.collectives import open_bucket, pack, write_into
from autoshard.ops.library import bound

# compiled(comm, args[, give]) -> outputs; clears args. Gradients go to give(name, value) as soon
# as they are made, and None is returned for them; without gradients there is no third argument.
Compiled = Callable[..., tuple]

aten = torch.ops.aten
RUN_AS: dict[object, Callable[..., object]] = {
    # A kernel may lay its result out in another way than its fake: a view of that is then a copy.
    aten.view.default: torch.reshape,
    # The same operators with the same arguments, called in half of the time: an overload goes
    # through a schema that is matched while the step runs.
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.div.Tensor: torch.div,
    aten.exp.default: torch.exp,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.permute.default: torch.permute,
    aten.reshape.default: torch.reshape,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
}
_files = itertools.count()


def generate(function: GraphFunction, name: str, kernels: str = "auto") -> Compiled:
    """Return the graph as a Python function; ``inspect.getsource`` shows its text."""
    text, bindings = write(function, name, kernels)
    filename = f"<autoshard {name} {next(_files)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = dict(bindings)
    exec(compile(text, filename, "exec"), namespace)
    return namespace[_identifier(name)]


def write(
    function: GraphFunction, name: str, kernels: str = "auto"
) -> tuple[str, dict[str, object]]:
    """Return the Python text of a graph and the objects that it names."""
    writer = _Writer(function, kernels)
    return writer.text(_identifier(name)), writer.bindings


def _identifier(name: str) -> str:
    text = "".join(c if c.isalnum() else "_" for c in name)
    return f"_{text}" if text[:1].isdigit() or keyword.iskeyword(text) else text


class _Writer:
    """Writes one graph; collects the operators and constants that the text refers to."""

    def __init__(self, function: GraphFunction, kernels: str) -> None:
        self.function, self.kernels = function, kernels
        self.bindings: dict[str, object] = {"torch": torch}
        self._names: dict[Node, str] = {}
        self._taken = {"comm", "args", "give", "torch"}
        self._by_id: dict[int, str] = {}
        self._lives = lifetimes(function)

    def text(self, name: str) -> str:
        give = ", give" if self.function.makes_gradients else ""
        lines = [f"def {name}(comm, args{give}):"]
        lines += self._unpack()
        for node in self.function.graph.nodes:
            if node.op == "call_function":
                lines += self._statements(node)
            elif node.op not in ("placeholder", "output"):
                raise InternalError(f"a graph to run has a node of kind '{node.op}': %{node.name}")
        results = (None if v in self._lives.handed else v for v in self.function.results)
        values = ", ".join(map(self._value, results))
        comma = "," if len(self.function.results) == 1 else ""
        lines.append(f"return ({values}{comma})")
        return "\n    ".join(lines) + "\n"

    def _unpack(self) -> list[str]:
        nodes = self.function.placeholders
        names = [self._name(node) for node in nodes]
        if not names:
            return []
        lines = [f"({', '.join(names)},) = args", "args.clear()"]
        unused = [self._name(node) for node in nodes if not node.users]
        return [*lines, f"del {', '.join(unused)}"] if unused else lines

    def _statements(self, node: Node) -> list[str]:
        lines = [] if node.target is pack else [self._assign(node)]
        for write in self._lives.writes.get(node, ()):
            lines += self._write(write)
        for port in self._lives.handed.get(node, ()):
            lines.append(f"give({port.name!r}, {self._name(node)})")
        dead = [self._name(value) for value in self._lives.dies.get(node, ())]
        return [*lines[:-1], f"{lines[-1]}; del {', '.join(dead)}"] if dead else lines

    def _write(self, write: Write) -> list[str]:
        """Copy a gradient into its bucket; the first one makes the bucket."""
        bucket, value, lines = self._name(write.bucket), self._name(write.value), []
        if write.is_first:
            grads, length, *dtype = write.bucket.args
            used = sum(val(grad).numel() for grad in grads)
            rest = ", ".join(map(self._value, [length, used, *dtype]))
            lines.append(f"{bucket} = {self._bind(open_bucket, 'open_bucket')}({value}, {rest})")
        write_to = self._bind(write_into, "write_into")
        return [*lines, f"{write_to}({bucket}, {write.offset}, {value})"]

    def _assign(self, node: Node) -> str:
        call = self._call(node)
        return f"{self._name(node)} = {call}" if node.users else call

    def _call(self, node: Node) -> str:
        if node.target is operator.getitem:
            return f"{self._value(node.args[0])}[{node.args[1]!r}]"
        call, takes_comm = bound(node.target, self.kernels)
        call = RUN_AS.get(call, call)
        values = ["comm"] if takes_comm else []
        values += [self._value(arg) for arg in node.args]
        values += [f"{key}={self._value(arg)}" for key, arg in node.kwargs.items()]
        hint = str(node.target)
        if hint.startswith("autoshard."):
            hint = hint.split(".")[1]
        return f"{self._bind(call, hint)}({', '.join(values)})"

    def _value(self, value: object) -> str:
        if isinstance(value, Node):
            return self._name(value)
        if isinstance(value, list | tuple):
            inner = ", ".join(self._value(item) for item in value)
            if isinstance(value, list):
                return f"[{inner}]"
            return f"({inner},)" if value else "()"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        if isinstance(value, float) and math.isfinite(value):
            return repr(value)
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return str(value)
        if isinstance(value, torch.device):
            return "comm.device"  # captured on the CPU, whatever the rank computes on
        return self._bind(value, f"const_{type(value).__name__}")

    def _bind(self, value: object, hint: str) -> str:
        known = self._by_id.get(id(value))
        if known is None:
            known = self._by_id[id(value)] = self._fresh(_identifier(hint))
            self.bindings[known] = value
        return known

    def _name(self, node: Node) -> str:
        if node not in self._names:
            self._names[node] = self._fresh(_identifier(node.name))
        return self._names[node]

    def _fresh(self, name: str) -> str:
        candidates = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(1)))
        fresh = next(c for c in candidates if c not in self._taken)
        self._taken.add(fresh)
        return fresh
