"""The state of one step on one rank: values between actions, messages under way, sums."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from autoshard.diagnostics import InternalError
from autoshard.ir.graph_function import (
    ACCUMULATED,
    BOUNDARY,
    FLAT_GRAD,
    FULL,
    FULL_GRAD,
    GRAD,
    LOSS,
    OUTPUT,
    TANGENT,
    Port,
)
from autoshard.ir.node_info import val
from autoshard.ops.communicator import IN_FLIGHT, Work
from autoshard.runtime.gradients import Gradients
from autoshard.runtime.trace import Done
from autoshard.runtime.wiring import Held, Wiring

if TYPE_CHECKING:
    from autoshard.runtime.executor import Executable
    from autoshard.runtime.steps import Post

Place = tuple[int, int]  # (stage, micro-batch)


class Run:
    """Carries out the actions of one rank.

    ``held[stage, microbatch]`` is what one action leaves for a later one; a value goes with its
    last reader. Values that are still on their way are held as Works.
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
        self.microbatches, self.normalizers, self._rng = microbatches, normalizers, rng
        self.held: defaultdict[Place, Held] = defaultdict(dict)
        self._outgoing: dict[tuple[Port, Place], torch.Tensor] = {}
        self._sending: defaultdict[tuple, deque[list[Work]]] = defaultdict(deque)
        self._resharded: set[int] = set()
        self.gradients = Gradients(self._storage, executable.unreached)
        self._give: dict[int, Callable[[str, torch.Tensor], None]] = {
            stage: partial(self.gradients.add, stage) for stage in self._storage.stages
        }
        self.trace: list[Done] = []
        self.losses: dict[int, torch.Tensor] = {}  # by micro-batch
        self.outputs: dict[tuple[str, int], torch.Tensor] = {}

    def rng(self, number: int) -> torch.Tensor:
        """Return what the random numbers of a micro-batch follow from."""
        value = self._rng[number]
        assert value is not None, "made whenever a phase of this rank reads it"
        return value

    def seed_backward(self, weight: float) -> None:
        """Set the gradient of the loss: the weight of this round of accumulation."""
        stage, port = self._exe.last_stage, Port(TANGENT, "loss")
        if stage not in self._storage.stages or not self._is_read(stage, port):
            return
        loss = self._exe.program.stages[stage].phases["F"].result(LOSS)
        assert loss is not None, "a program that trains has a loss"
        fake = val(loss)
        seed = torch.full((), weight, dtype=fake.dtype, device=self._comm.device)
        for number in range(len(self.microbatches)):
            self.held[stage, number][port] = seed

    def actions(self) -> None:
        """Carry out all steps of the program and wait until every message is delivered."""
        self._storage.send()
        for stage in self._exe.gathered_first:
            self.unshard(stage)
        clock, now, note = self._comm.clock, time.perf_counter, self.trace.append
        for actions, call, args in self._exe.steps:
            begin, waited = now(), clock.seconds
            call(self, *args)
            note(Done(actions, begin, now(), clock.seconds - waited))
        for sent in self._sending.values():
            _wait_down_to(sent, 0)
        self._storage.clear()
        left = {place: list(map(str, held)) for place, held in self.held.items() if held}
        if left:
            raise InternalError(f"values that no action read are left over: {left}")

    # what steps call ----------------------------------------------------------------------------
    def compute(self, wirings: Sequence[Wiring], number: int) -> None:
        """Run phases of one stage for a micro-batch."""
        for wiring in wirings:
            self._phase(wiring, wiring.stage, number)

    def transfer(self, posts: Sequence[Post]) -> None:
        """Post all messages of a step at once."""
        transfers, ports = [], []
        for post in posts:
            place = post.stage, post.number
            for letter in post.sends:
                value = self._outgoing.pop((letter.port, place))
                transfers.append(letter.send(value))
            for port, transfer in post.receives:
                ports.append((self.held[place], port))
                transfers.append(transfer)
            if post.sends:
                # Old messages first, so that their values don't pile up. No deadlock can come of
                # it: the schedule runs even if every send waits for its receive.
                _wait_down_to(self._sending[post.lane], IN_FLIGHT)
        if not transfers:
            return
        works = iter(self._comm.transfer_start(transfers))
        arriving = iter(ports)
        for post in posts:
            if post.sends:
                self._sending[post.lane].append([next(works) for _ in post.sends])
            for _ in post.receives:
                held, port = next(arriving)
                held[port] = next(works)

    def unshard(self, stage: int) -> None:
        """Gather or cast the parameters that a stage reads in another form than they are stored."""
        phase = self._exe.code.get((stage, "U"))
        if phase is None:
            return
        args = [self._storage.flat(port.name) for port in phase.inputs]
        for port, value in zip(phase.outputs, phase.call(self._comm, args), strict=True):
            assert port.kind == FULL, port
            self._storage.gather(port.name, value)

    def reshard(self, stage: int) -> None:
        """Free what no stage of this rank will read any more."""
        self._resharded.add(stage)
        for name, readers in self._exe.readers.items():
            if stage in readers and readers <= self._resharded:
                self._storage.release(name)

    def reduce(self, stage: int) -> None:
        """Reduce a stage's sums of gradients over data parallel ranks."""
        phase = self._exe.code.get((stage, "R"))
        if phase is None:
            return
        takers = {ACCUMULATED: self.gradients.take_sum, FLAT_GRAD: self.gradients.take_shard}
        args = [takers[port.kind](port.name) for port in phase.inputs]
        for port, value in zip(phase.outputs, phase.call(self._comm, args), strict=True):
            assert port.kind in (FLAT_GRAD, FULL_GRAD), port
            self.gradients.put(port.name, value)

    # private ------------------------------------------------------------------------------------
    def _phase(self, wiring: Wiring, stage: int, number: int) -> None:
        held = self.held[stage, number]
        for port, shape, dtype in wiring.gaps:  # gradients that the next stage does not compute
            if port not in held:
                held[port] = torch.zeros(shape, dtype=dtype, device=self._comm.device)
        give = (self._give[stage],) if wiring.gives else ()
        call = self._exe.code[stage, wiring.name].call
        results = call(self._comm, wiring.args(self, number), *give)
        if wiring.copied is None:
            wiring.copied = self._exe.messages.in_buffers(results)
        if wiring.copied:
            copied = wiring.copied
            results = tuple(r.clone() if i in copied else r for i, r in enumerate(results))
        wiring.keep(held, results)
        for place, port in wiring.outputs:
            self._output(port, results[place], stage, number)

    def _output(self, port: Port, value: torch.Tensor, stage: int, number: int) -> None:
        if port.kind == GRAD:
            self.gradients.add(stage, port.name, value)
        elif port.kind == FLAT_GRAD:
            self.gradients.add_shard(stage, port.name, value)
        elif port.kind == LOSS:
            self.losses[number] = value
        elif port.kind == OUTPUT:
            self.outputs[port.name, number] = value
        else:
            self._pass_on(port, value, stage, number)

    def _pass_on(self, port: Port, value: torch.Tensor, stage: int, number: int) -> None:
        """Give a boundary value or its gradient to the neighbour stage, or keep it for a SEND."""
        neighbour = stage + (1 if port.kind == BOUNDARY else -1)
        if neighbour not in self._storage.stages:
            self._outgoing[port, (stage, number)] = value
        elif self._is_read(neighbour, port):
            self.held[neighbour, number][port] = value

    def _is_read(self, stage: int, port: Port) -> bool:
        return (stage, port) in self._exe.reads


def _wait_down_to(sent: deque[list[Work]], count: int) -> None:
    while len(sent) > count:
        for work in sent.popleft():
            work.wait()
