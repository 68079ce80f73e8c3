"""The state of one step on one rank: values between actions, messages under way, sums."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from autoshard.diagnostics import InternalError
from autoshard.ir.graph_function import (
    ACCUMULATED,
    BATCH,
    BOUNDARY,
    BUFFER,
    FLAT,
    FLAT_GRAD,
    FULL,
    FULL_GRAD,
    GRAD,
    LOSS,
    NORMALIZER,
    OUTPUT,
    PARAM,
    RNG,
    SAVED,
    TANGENT,
    Port,
)
from autoshard.ir.node_info import val
from autoshard.ops.communicator import IN_FLIGHT, Work
from autoshard.runtime.gradients import Gradients
from autoshard.runtime.messages import microbatch_of
from autoshard.runtime.trace import Done
from autoshard.runtime.work import Ready, Transfer
from autoshard.schedule import Action, Kind
from autoshard.schedule.action import RECVS, SENDS

if TYPE_CHECKING:
    from autoshard.runtime.executor import Executable

Place = tuple[int, int]  # (stage, micro-batch)
CARRIES = {
    Kind.SEND_F: BOUNDARY,
    Kind.RECV_F: BOUNDARY,
    Kind.SEND_B: TANGENT,
    Kind.RECV_B: TANGENT,
}


class Run:
    """Carries out the actions of one rank.

    ``values[stage, microbatch]`` holds what one action leaves for a later one, by port; a value
    goes with its last reader. Values that are still on their way are held as Works.
    """

    def __init__(
        self,
        executable: Executable,
        microbatches: Sequence[Mapping[str, torch.Tensor]],
        normalizers: Mapping[str, torch.Tensor],
        rng: Sequence[torch.Tensor | None],
    ) -> None:
        """Start with no value anywhere."""
        self._exe, self._comm, self._storage = executable, executable.comm, executable.storage
        self._microbatches, self._normalizers, self._rng = microbatches, normalizers, rng
        self._values: dict[Place, dict[Port, torch.Tensor | Work]] = {}
        self._outgoing: dict[tuple[str, int, int], dict[str, torch.Tensor]] = {}
        self._sending: dict[tuple[Kind, int], deque[Work]] = {}
        self._resharded: set[int] = set()
        self.gradients = Gradients(self._storage, executable.unreached)
        self.trace: list[Done] = []
        self.losses: dict[int, torch.Tensor] = {}  # by micro-batch
        self.outputs: dict[tuple[str, int], torch.Tensor] = {}

    def seed_backward(self, weight: float) -> None:
        """Set the gradient of the loss: the weight of this round of accumulation."""
        stage, port = self._exe.last_stage, Port(TANGENT, "loss")
        if stage not in self._storage.stages or not self._is_read(stage, port):
            return
        loss = self._exe.program.stages[stage].phases["F"].result(LOSS)
        assert loss is not None, "a program that trains has a loss"
        fake = val(loss)
        seed = torch.full((), weight, dtype=fake.dtype, device=self._comm.device)
        for number in range(len(self._microbatches)):
            self._place(stage, number)[port] = seed

    def actions(self, groups: Sequence[tuple[Action, ...]]) -> None:
        """Carry out all actions and wait until every message is delivered."""
        self._storage.send()
        for stage in self._exe.gathered_first:
            self._unshard(stage)
        for group in groups:
            begin, waited = time.perf_counter(), self._comm.clock.seconds
            self._carry_out(group)
            blocked = self._comm.clock.seconds - waited
            self.trace.append(Done(group, begin, time.perf_counter(), blocked))
        for works in self._sending.values():
            _wait_down_to(works, 0)
        self._storage.gathered.clear()
        left = {place: list(map(str, held)) for place, held in self._values.items() if held}
        if left:
            raise InternalError(f"values that no action read are left over: {left}")

    def _carry_out(self, group: tuple[Action, ...]) -> None:
        action = group[0]
        if action.kind in SENDS or action.kind in RECVS:
            self._transfer(group)
        elif action.kind is Kind.B:
            self._phase("I", action.stage, microbatch_of(action))
            self._phase("W", action.stage, microbatch_of(action))
        elif action.kind is Kind.UNSHARD:
            self._unshard(action.stage)
        elif action.kind is Kind.RESHARD:
            self._reshard(action.stage)
        elif action.kind is Kind.REDUCE_GRAD:
            self._reduce(action.stage)
        else:
            self._phase(action.kind.value, action.stage, microbatch_of(action))

    def _phase(self, name: str, stage: int, number: int) -> None:
        phase = self._exe.code.get((stage, name))
        if phase is None:
            return
        held = self._place(stage, number)
        if name == "I":
            self._fill_tangents(stage, held)
        inputs = self._exe.inputs[stage, name]
        args = inputs.fixed.copy()
        for place, port, is_last in inputs.moving:
            args[place] = self._input(port, stage, number, is_last)
        give = [partial(self.gradients.add, stage)] if phase.gives else []
        results = phase.call(self._comm, args, *give)
        for port, value in zip(phase.outputs, results, strict=True):
            if value is not None:
                self._output(port, value, stage, number)

    def _input(self, port: Port, stage: int, number: int, is_last: bool) -> torch.Tensor:
        name = port.name
        if port.kind in (SAVED, BOUNDARY, TANGENT):
            held = self._values[stage, number]
            value = held.pop(port) if is_last else held[port]
            return value if isinstance(value, torch.Tensor) else value.wait()
        if port.kind == PARAM:
            return self._storage.param(name)
        if port.kind == BATCH:
            return self._microbatches[number][name]
        if port.kind == FLAT:
            return self._storage.flat(name)
        if port.kind == BUFFER:
            own = self._exe.constants.get(name)
            return self._storage.buffer(name) if own is None else own
        if port.kind == NORMALIZER:
            return self._normalizers[name]
        if port.kind == RNG:
            rng = self._rng[number]
            assert rng is not None, "made whenever a phase of this rank reads it"
            return rng
        raise InternalError(f"stage {stage} reads '{port}': no such input at run time")

    def _output(self, port: Port, value: torch.Tensor, stage: int, number: int) -> None:
        if port.kind == GRAD:
            self.gradients.add(stage, port.name, value)
        elif port.kind == FLAT_GRAD:
            self.gradients.add_shard(stage, port.name, value)
        elif port.kind == LOSS:
            self.losses[number] = value
        elif port.kind == OUTPUT:
            self.outputs[port.name, number] = value
        elif port.kind == SAVED:
            self._place(stage, number)[port] = value
        else:
            self._pass_on(port, value, stage, number)

    def _pass_on(self, port: Port, value: torch.Tensor, stage: int, number: int) -> None:
        """Give a boundary value or its gradient to the neighbour stage, or keep it for a SEND."""
        neighbour = stage + (1 if port.kind == BOUNDARY else -1)
        if neighbour in self._storage.stages:
            if self._is_read(neighbour, port):
                self._place(neighbour, number)[port] = value
            return
        self._outgoing.setdefault((port.kind, stage, number), {})[port.name] = value

    def _transfer(self, group: tuple[Action, ...]) -> None:
        """Post the messages of all actions of the group at once."""
        posted: list[tuple[Action, str, Transfer]] = []
        for action in group:
            if action.kind in SENDS:
                key = (CARRIES[action.kind], action.stage, microbatch_of(action))
                tensors = self._outgoing.pop(key, {})
                transfers = self._exe.messages.send(action, tensors)
                self._let_arrive(action)
            else:
                transfers = self._exe.messages.receive(action)
            posted += [(action, name, transfer) for name, transfer in transfers.items()]
        if not posted:
            return
        works = self._comm.transfer_start([transfer for _, _, transfer in posted])
        for (action, name, _), work in zip(posted, works, strict=True):
            if action.kind in SENDS:
                self._sending.setdefault((action.kind, action.stage), deque()).append(work)
            else:
                place = self._place(action.stage, microbatch_of(action))
                place[Port(CARRIES[action.kind], name)] = work

    def _let_arrive(self, action: Action) -> None:
        """Wait for old messages, so that their buffers don't pile up.

        No deadlock can come of it: the schedule runs even if every send waits for its receive.
        """
        count = len(self._exe.messages.values(action))
        _wait_down_to(self._sending.get((action.kind, action.stage), deque()), IN_FLIGHT * count)

    def _fill_tangents(self, stage: int, held: dict[Port, torch.Tensor | Work]) -> None:
        """Give zeros for gradients that the next stage does not compute."""
        function = self._exe.program.stages[stage].phases["I"]
        for name, node in function.named(TANGENT).items():
            port = Port(TANGENT, name)
            if port not in held:
                fake = val(node)
                zeros = torch.zeros(fake.shape, dtype=fake.dtype, device=self._comm.device)
                held[port] = Ready(zeros)

    def _unshard(self, stage: int) -> None:
        phase = self._exe.code.get((stage, "U"))
        if phase is None:
            return
        args = [self._storage.flat(port.name) for port in phase.inputs]
        for port, value in zip(phase.outputs, phase.call(self._comm, args), strict=True):
            assert port.kind == FULL, port
            self._storage.gathered[port.name] = value

    def _reshard(self, stage: int) -> None:
        """Free what no stage of this rank will read any more."""
        self._resharded.add(stage)
        for name, readers in self._exe.readers.items():
            if stage in readers and readers <= self._resharded:
                self._storage.gathered.pop(name, None)

    def _reduce(self, stage: int) -> None:
        phase = self._exe.code.get((stage, "R"))
        if phase is None:
            return
        takers = {ACCUMULATED: self.gradients.take_sum, FLAT_GRAD: self.gradients.take_shard}
        args = [takers[port.kind](port.name) for port in phase.inputs]
        for port, value in zip(phase.outputs, phase.call(self._comm, args), strict=True):
            assert port.kind in (FLAT_GRAD, FULL_GRAD), port
            self.gradients.put(port.name, value)

    def _is_read(self, stage: int, port: Port) -> bool:
        return (stage, port) in self._exe.reads

    def _place(self, stage: int, number: int) -> dict[Port, torch.Tensor | Work]:
        return self._values.setdefault((stage, number), {})


def _wait_down_to(works: deque[Work], count: int) -> None:
    while len(works) > count:
        works.popleft().wait()
