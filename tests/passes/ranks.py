"""Virtual tensor-parallel ranks for tests of the passes: threads, one communicator, real autograd.

The graph is interpreted node by node and differentiated by torch, so these tests depend on no
lowering and no code generation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autoshard.ir.graph_function import GraphFunction
from autoshard.ops import collectives, dropout, library, vocab  # noqa: F401  (define the ops)

_here = threading.local()
_kernels = torch.library.Library("autoshard", "FRAGMENT")


def _register() -> None:
    """Let our ops run eagerly: they ask the thread's communicator."""
    for spec in tuple(library._specs.values()):
        key = f"autoshard::{spec.name}"
        if not torch._C._dispatch_has_kernel_for_dispatch_key(key, "CPU"):
            _kernels.impl(spec.name, lambda *args, s=spec: s.run(_here.comm, *args), "CPU")


@dataclass(frozen=True)
class Done:
    """A collective whose result is there."""

    value: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Return the result."""
        return self.value


class Exchange:
    """The meeting point of the ranks of one axis."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list = [None] * size
        self.log: list[str] = []

    def swap(self, index: int, what: str, value: torch.Tensor) -> list[torch.Tensor]:
        """Return the values of all ranks; all must ask for the same thing."""
        self.slots[index] = (what, value)
        self.barrier.wait()
        slots = list(self.slots)
        self.barrier.wait()
        assert len({w for w, _ in slots}) == 1, f"ranks disagree: {[w for w, _ in slots]}"
        assert len({tuple(v.shape) for _, v in slots}) == 1, "ranks disagree on shapes"
        if index == 0:
            self.log.append(what)
        return [v for _, v in slots]


class Comm:
    """A communicator of one virtual rank along one axis."""

    def __init__(self, exchange: Exchange, index: int, axis: str = "tp") -> None:
        self.exchange, self.place, self.axis = exchange, index, axis

    def index(self, axis: str) -> int:
        """Return the rank's place along the axis."""
        return self.place if axis == self.axis else 0

    def size(self, axis: str) -> int:
        """Return the number of ranks along the axis."""
        return self.exchange.size if axis == self.axis else 1

    def all_reduce_start(self, value, axis, op="sum", members=None) -> Done:
        """Sum (or take the maximum) over the ranks, or over ``members`` of them."""
        parts = torch.stack(self.exchange.swap(self.place, f"all_reduce {op}", value.detach()))
        parts = parts if members is None else parts[list(members)]
        return Done(parts.amax(0) if op == "max" else parts.sum(0))

    def all_gather_start(self, value, axis) -> Done:
        """Stack the values of all ranks."""
        return Done(torch.stack(self.exchange.swap(self.place, "all_gather", value.detach())))

    def reduce_scatter_start(self, value, axis) -> Done:
        """Sum over ranks, each keeps its row."""
        parts = self.exchange.swap(self.place, "reduce_scatter", value.detach())
        return Done(sum(parts)[self.place])


def on_ranks(size: int, work: Callable[[Comm], object], axis: str = "tp") -> list:
    """Run ``work`` on every virtual rank at once and return their results."""
    _register()
    exchange = Exchange(size)
    results: list = [None] * size
    errors: list[BaseException] = []

    def body(index: int) -> None:
        comm = Comm(exchange, index, axis)
        _here.comm = comm
        try:
            results[index] = work(comm)
        except BaseException as error:
            errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=body, args=(i,)) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
        )
    return results


def interpret(function: GraphFunction, inputs: Sequence[torch.Tensor]) -> tuple:
    """Return the graph's outputs, in autograd's sight."""
    values = dict(zip(function.placeholders, inputs, strict=True))
    for node in function.graph.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)
    return tuple(None if r is None else values[r] for r in function.results)
