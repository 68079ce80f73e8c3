"""Boundary values between stages as messages: their names, shapes and tags are known beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autoshard.diagnostics import InternalError
from autoshard.ir.graph_function import BOUNDARY, TANGENT, GraphFunction, Port
from autoshard.ir.node_info import val
from autoshard.ir.program import Program
from autoshard.runtime.layout import scheduled
from autoshard.runtime.work import Transfer
from autoshard.schedule import Action, Kind
from autoshard.schedule.action import SENDS

MAX_VALUES = 1 << 10  # values on one boundary


@dataclass(frozen=True)
class Value:
    """One value that crosses a boundary."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Boundary:
    """What stage ``left`` sends to ``left + 1`` per micro-batch, and the gradients sent back."""

    left: int
    forward: tuple[Value, ...]
    backward: tuple[Value, ...]  # only those that the right stage computes


def microbatch_of(action: Action) -> int:
    """Return the micro-batch of a compute or transfer action."""
    assert action.microbatch is not None, f"{action} is of no micro-batch"
    return action.microbatch


def boundaries(program: Program) -> tuple[Boundary, ...]:
    """Return the boundary after each stage but the last; both sides must agree on its values."""
    stages = program.stages
    return tuple(_boundary(program, left) for left in range(len(stages) - 1))


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


def _values(nodes: dict) -> tuple[Value, ...]:
    fakes = {name: val(node) for name, node in sorted(nodes.items())}
    return tuple(Value(name, tuple(fake.shape), fake.dtype) for name, fake in fakes.items())


class Messages:
    """Makes the transfers of one rank's SEND and RECV actions."""

    def __init__(self, program: Program, device: torch.device) -> None:
        """Read the boundaries off the stages' graphs."""
        self._boundaries = boundaries(program)
        self._stage_to_rank = scheduled(program).stage_to_rank
        self._microbatches, self._device = program.num_microbatches, device

    def values(self, action: Action) -> tuple[Value, ...]:
        """Return what the action sends or receives, in order."""
        is_forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
        left = min(action.stage, action.peer_stage)
        boundary = self._boundaries[left]
        return boundary.forward if is_forward else boundary.backward

    def send(self, action: Action, tensors: dict[str, torch.Tensor]) -> dict[str, Transfer]:
        """Return the transfers of a SEND action by value name."""
        names = [value.name for value in self.values(action)]
        return {
            name: self._transfer(action, i, tensors[name].contiguous())
            for i, name in enumerate(names)
        }

    def receive(self, action: Action) -> dict[str, Transfer]:
        """Return the transfers of a RECV action by value name; buffers are new."""
        return {
            value.name: self._transfer(action, i, self._buffer(value))
            for i, value in enumerate(self.values(action))
        }

    def _buffer(self, value: Value) -> torch.Tensor:
        return torch.empty(value.shape, dtype=value.dtype, device=self._device)

    def _transfer(self, action: Action, place: int, tensor: torch.Tensor) -> Transfer:
        is_forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
        left = min(action.stage, action.peer_stage)
        tag = ((left * self._microbatches + microbatch_of(action)) * 2 + is_forward) * MAX_VALUES
        peer = self._stage_to_rank[action.peer_stage]
        return Transfer(action.kind in SENDS, tensor, "pp", peer, tag + place)
