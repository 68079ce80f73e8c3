"""The messages of one rank: buffers, tags and peers are settled when a program is linked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autoshard.ir.graph_function import Port
from autoshard.ir.messages import CARRIES, Value, boundaries, inbox, left_of
from autoshard.ir.program import Program
from autoshard.runtime.layout import scheduled
from autoshard.runtime.work import Transfer
from autoshard.schedule import Action, Kind
from autoshard.schedule.action import RECVS

MAX_VALUES = 1 << 10  # values on one boundary


def microbatch_of(action: Action) -> int:
    """Return the micro-batch of a compute or transfer action."""
    assert action.microbatch is not None, f"{action} is of no micro-batch"
    return action.microbatch


@dataclass(frozen=True)
class Letter:
    """One value of a SEND or RECV: the port it belongs to, and what is known beforehand."""

    port: Port
    peer: int  # coordinate along pp
    tag: int

    def send(self, value: torch.Tensor) -> Transfer:
        """Return the transfer of a value."""
        return Transfer(True, value.contiguous(), "pp", self.peer, self.tag)


class Messages:
    """What a rank sends, and the buffers that it receives in."""

    def __init__(self, program: Program, device: torch.device, rank: int) -> None:
        """Allocate the buffers of pipeline coordinate ``rank``, for all steps to come."""
        schedule = scheduled(program)
        row = schedule.ranks[rank]
        box = inbox(program, row)
        self.buffers = [torch.empty(b.shape, dtype=b.dtype, device=device) for b in box.buffers]
        self._boundaries, self._microbatches = boundaries(program), program.num_microbatches
        self._stage_to_rank = schedule.stage_to_rank
        self.receives: Mapping[Action, tuple[tuple[Port, Transfer], ...]] = {
            action: self._receive(action, box.places[action])
            for action in row
            if action.kind in RECVS
        }
        self._places = {buffer.data_ptr() for buffer in self.buffers if buffer.numel()}

    def values(self, action: Action) -> tuple[Value, ...]:
        """Return what the action sends or receives, in order."""
        return self._boundaries[left_of(action)].carried(action)

    def letters(self, action: Action) -> tuple[Letter, ...]:
        """Return the messages of a SEND or RECV action, in order."""
        is_forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
        place = left_of(action) * self._microbatches + microbatch_of(action)
        tag = (place * 2 + is_forward) * MAX_VALUES
        peer, kind = self._stage_to_rank[action.peer_stage], CARRIES[action.kind]
        names = (value.name for value in self.values(action))
        return tuple(Letter(Port(kind, name), peer, tag + i) for i, name in enumerate(names))

    def in_buffers(self, results: Sequence[torch.Tensor | None]) -> tuple[int, ...]:
        """Return which results lie in a buffer, whose next message would overwrite them."""
        return tuple(
            place
            for place, value in enumerate(results)
            if value is not None and value.untyped_storage().data_ptr() in self._places
        )

    def _receive(self, action: Action, places: Sequence[int]) -> tuple[tuple[Port, Transfer], ...]:
        pairs = zip(self.letters(action), places, strict=True)
        return tuple(
            (letter.port, Transfer(False, self.buffers[place], "pp", letter.peer, letter.tag))
            for letter, place in pairs
        )
