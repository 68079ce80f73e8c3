"""What crosses stage boundaries as messages, and which buffers of a rank they arrive in.

All of it follows from the graphs and the schedule, so the run-time allocates its buffers once, and
the prediction of memory counts the same ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from autoshard.diagnostics import InternalError
from autoshard.ir.graph_function import BOUNDARY, TANGENT, GraphFunction, Port
from autoshard.ir.node_info import val
from autoshard.ir.program import PER_MICROBATCH, Program
from autoshard.schedule import Action, Kind
from autoshard.schedule.action import RECVS
from autoshard.schedule.posting import posted

CARRIES = {
    Kind.SEND_F: BOUNDARY,
    Kind.RECV_F: BOUNDARY,
    Kind.SEND_B: TANGENT,
    Kind.RECV_B: TANGENT,
}
_RUNS = {Kind.F: "F", Kind.I: "I", Kind.W: "W", Kind.B: "IW"}


@dataclass(frozen=True)
class Value:
    """One value that crosses a boundary."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return its size."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Boundary:
    """What stage ``left`` sends to ``left + 1`` per micro-batch, and the gradients sent back."""

    left: int
    forward: tuple[Value, ...]
    backward: tuple[Value, ...]  # only those that the right stage computes

    def carried(self, action: Action) -> tuple[Value, ...]:
        """Return what a SEND or RECV over this boundary carries, in order."""
        return self.forward if CARRIES[action.kind] == BOUNDARY else self.backward


def boundaries(program: Program) -> tuple[Boundary, ...]:
    """Return the boundary after each stage but the last; both sides must agree on its values."""
    stages = program.stages
    return tuple(_boundary(program, left) for left in range(len(stages) - 1))


def left_of(action: Action) -> int:
    """Return the number of the boundary that a SEND or RECV crosses."""
    return min(action.stage, action.peer_stage)


@dataclass(frozen=True)
class Inbox:
    """The buffers of a rank for what it receives, and which of them each receive fills.

    A buffer is taken when the receive is posted, and free again when the last phase that reads its
    value is done: so there are as many as are ever in use at once.
    """

    buffers: tuple[Value, ...]  # shapes and dtypes; a name is that of the first value in it
    places: Mapping[Action, tuple[int, ...]]  # RECV -> number of the buffer, by value

    @property
    def nbytes(self) -> int:
        """Return the size of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)


def inbox(program: Program, row: Sequence[Action]) -> Inbox:
    """Return the buffers of the rank that carries out ``row``.

    Buffers of one shape and dtype serve every boundary.
    """
    edges = boundaries(program)
    buffers: list[Value] = []
    places: dict[Action, tuple[int, ...]] = {}
    free: dict[tuple, list[int]] = defaultdict(list)
    held: dict[tuple[int, int | None, str], list[int]] = defaultdict(list)  # by last reader
    for action in (action for step in posted(row) for action in step):
        if action.kind in RECVS:
            taken = []
            for value in edges[left_of(action)].carried(action):
                unused = free[value.shape, value.dtype]
                if not unused:
                    unused.append(len(buffers))
                    buffers.append(value)
                taken.append(unused.pop())
                phase = _last_reader(program, action, value.name)
                held[action.stage, action.microbatch, phase].append(taken[-1])
            places[action] = tuple(taken)
        for phase in _RUNS.get(action.kind, ""):
            for number in held.pop((action.stage, action.microbatch, phase), ()):
                free[buffers[number].shape, buffers[number].dtype].append(number)
    return Inbox(tuple(buffers), places)


def _last_reader(program: Program, recv: Action, name: str) -> str:
    """Return the last phase of the receiving stage that reads a value."""
    port, phases = Port(CARRIES[recv.kind], name), program.stages[recv.stage].phases
    readers = [p for p in PER_MICROBATCH if p in phases and port in phases[p].inputs]
    return readers[-1] if readers else PER_MICROBATCH[-1]


def _boundary(program: Program, left: int) -> Boundary:
    giver, taker = program.stages[left].phases, program.stages[left + 1].phases
    given = {name for name, node in giver["F"].named_results(BOUNDARY).items() if node is not None}
    taken = taker["F"].named(BOUNDARY)
    if given != set(taken):
        odd = sorted(given ^ set(taken))
        raise InternalError(f"stages {left} and {left + 1} disagree on what crosses: {odd}")
    return Boundary(left, _values(taken), _tangents(giver, taker))


def _tangents(
    giver: dict[str, GraphFunction], taker: dict[str, GraphFunction]
) -> tuple[Value, ...]:
    """Return the gradients that the right stage computes and the left one reads."""
    if "I" not in taker or "I" not in giver:
        return ()
    read = {port for name in ("I", "W") if name in giver for port in giver[name].inputs}
    results = taker["I"].named_results(TANGENT)
    computed = {name: node for name, node in results.items() if node is not None}
    return _values({n: node for n, node in computed.items() if Port(TANGENT, n) in read})


def _values(nodes: Mapping[str, Node]) -> tuple[Value, ...]:
    fakes = {name: val(node) for name, node in sorted(nodes.items())}
    return tuple(Value(name, tuple(fake.shape), fake.dtype) for name, fake in fakes.items())
