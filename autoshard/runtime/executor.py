"""Run one training step, or one evaluation, of a linked Program on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from autoshard.ir.buckets import unreached_parameters
from autoshard.ir.graph_function import LOSS, NORMALIZER, OUTPUT, PARAM, RNG, Port
from autoshard.ir.node_info import val
from autoshard.ir.program import PER_MICROBATCH, Program
from autoshard.runtime.codegen import Compiled
from autoshard.runtime.comm import Transport
from autoshard.runtime.counts import count_step
from autoshard.runtime.device import to_device
from autoshard.runtime.layout import scheduled
from autoshard.runtime.loss_scale import LossScaler
from autoshard.runtime.messages import Messages
from autoshard.runtime.phases import Code, Phase
from autoshard.runtime.prelude import Prelude
from autoshard.runtime.run import Run
from autoshard.runtime.steps import prepare
from autoshard.runtime.storage import Storage
from autoshard.runtime.trace import Done
from autoshard.runtime.wiring import Wiring
from autoshard.schedule import Kind

Leaves = Mapping[str, torch.Tensor]


class Executable:
    """A Program linked for one rank: its generated code, its storage, its place in the mesh."""

    def __init__(
        self,
        program: Program,
        comm: Transport,
        storage: Storage,
        code: Code,
        prelude: Compiled | None,
        notes: tuple[str, ...] = (),
    ) -> None:
        """Bind what ``runtime.link`` prepared; ``notes`` are lines for the report."""
        self.notes = notes
        self.program, self.comm, self.storage, self.code = program, comm, storage, code
        rank = comm.index("pp")
        self.messages = Messages(program, comm.device, rank)
        self.constants = {n: v.to(comm.device) for n, v in program.constants.items()}
        self.trace: tuple[Done, ...] = ()  # of the last step
        self.unreached = unreached_parameters(program)
        scheduled_gathers = _stages_with(program, Kind.UNSHARD)
        self.gathered_first = sorted(set(storage.stages) - scheduled_gathers)
        self.reads = _ports_read(code, storage.stages)
        self.wirings = {
            (stage, name): Wiring(program.stages[stage], name, phases, storage, self.constants)
            for stage, phases in ((stage, _phases(code, stage)) for stage in storage.stages)
            for name in phases
        }
        self.steps = tuple(prepare(self, scheduled(program).ranks[rank]))
        self.readers = _readers(storage, self.reads)
        self.last_stage = len(program.stages) - 1
        needs_count = any(self._reads(stage, NORMALIZER) for stage in storage.stages)
        self.prelude = None
        if prelude is not None and needs_count:
            self.prelude = Prelude(program, prelude, self.constants)

    def step(
        self, microbatches: Sequence[Leaves], weight: float = 1.0, *, seed: int = 0, index: int = 0
    ) -> torch.Tensor:
        """Run all actions, attach every ``.grad`` and return the global loss (not weighted).

        With a loss scale an overflow on any rank leaves no ``.grad`` on any of them.

        ``seed`` and ``index``, the number of the step, key the random numbers.
        """
        with torch.no_grad():
            run = self._start(microbatches, seed, index)
            scaler = self.storage.scaler
            scale = scaler.scale if scaler else 1.0
            run.seed_backward(weight * scale)
            run.actions()
            if scaler is None or self._keeps(scaler, run):
                run.gradients.attach(1.0 / scale)
            else:
                self.storage.drop_gradients()
            self.trace = tuple(run.trace)
            return self.share_loss(run.losses)

    def _keeps(self, scaler: LossScaler, run: Run) -> bool:
        return scaler.keeps(run.gradients.finish(), self.comm, self.comm.device)

    def evaluate(self, microbatches: Sequence[Leaves]) -> torch.Tensor | dict[str, torch.Tensor]:
        """Run the forward actions; return the global loss, or outputs joined over micro-batches."""
        with torch.no_grad():
            run = self._start(microbatches, 0, 0)
            run.actions()
            if self._last_ports(LOSS):
                return self.share_loss(run.losses)
            return self._share_outputs(run.outputs)

    def share_loss(self, losses: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return the sum over micro-batches and data parallel ranks, on every rank."""
        fake = val(self._last_ports(LOSS)[""])
        if self.last_stage in self.storage.stages:
            total = losses[0].clone()
            for number in range(1, self.program.num_microbatches):
                total += losses[number]
            total = self.comm.all_reduce_start(total, "dp").wait()
        else:
            total = torch.zeros((), dtype=fake.dtype, device=self.comm.device)
        return self.comm.broadcast(total, "pp", self._last_rank)

    def _share_outputs(
        self, outputs: Mapping[tuple[str, int], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return every output leaf, its micro-batches joined on dim 0, on every pipeline rank."""
        shared = {}
        for name, node in self._last_ports(OUTPUT).items():
            count, fake = self.program.num_microbatches, val(node)
            if self.last_stage in self.storage.stages:
                whole = _join([outputs[name, i] for i in range(count)])
            else:
                shape = (fake.shape[0] * count, *fake.shape[1:]) if fake.dim() else (count,)
                whole = torch.zeros(shape, dtype=fake.dtype, device=self.comm.device)
            shared[name] = self.comm.broadcast(whole, "pp", self._last_rank)
        return shared

    @cached_property
    def counts(self) -> dict[str, int]:
        """Return actions, launches, copies, collectives and messages of one step."""
        actions = [action for step in self.steps for action in step.actions]
        return count_step(self.program, self.messages, actions, self.gathered_first)

    @property
    def _last_rank(self) -> int:
        return scheduled(self.program).stage_to_rank[self.last_stage]

    def _last_ports(self, kind: str) -> dict[str, torch.fx.Node]:
        results = self.program.stages[self.last_stage].phases["F"].named_results(kind)
        return {name: node for name, node in results.items() if node is not None}

    def _start(self, microbatches: Sequence[Leaves], seed: int, index: int) -> Run:
        counts = self.prelude.run(microbatches, self.comm) if self.prelude else {}
        rng = [self._rng(seed, index, number) for number in range(len(microbatches))]
        return Run(self, microbatches, counts, rng)

    def _rng(self, seed: int, index: int, number: int) -> torch.Tensor | None:
        if not any(self._reads(stage, RNG) for stage in self.storage.stages):
            return None
        rows = next(leaf.shape[0] for leaf in self.program.leaves if leaf.is_split)
        first = (self.comm.index("dp") * self.program.num_microbatches + number) * rows
        return to_device(torch.tensor([seed, index, first]), self.comm.device)

    def _reads(self, stage: int, kind: str) -> bool:
        phases = self.program.stages[stage].phases.values()
        return any(port.kind == kind for function in phases for port in function.inputs)


def _stages_with(program: Program, kind: Kind) -> frozenset[int]:
    rows = scheduled(program).ranks
    return frozenset(a.stage for row in rows for a in row if a.kind is kind)


def _phases(code: Code, stage: int) -> dict[str, Phase]:
    """Return a stage's micro-batch phases, in the order in which they run."""
    return {name: code[stage, name] for name in PER_MICROBATCH if (stage, name) in code}


def _ports_read(code: Code, stages: Sequence[int]) -> frozenset[tuple[int, Port]]:
    """Return what the micro-batch phases of a rank's stages take in: (stage, port)."""
    phases = ((stage, phase) for stage in stages for phase in _phases(code, stage).values())
    return frozenset((stage, port) for stage, phase in phases for port in phase.inputs)


def _readers(storage: Storage, reads: frozenset[tuple[int, Port]]) -> dict[str, frozenset[int]]:
    """Return for each cut bucket the stages of this rank that read its parameters whole."""
    layout = storage.layout
    found: dict[str, set[int]] = {}
    for stage, port in reads:
        slot = layout.slots.get(port.name) if port.kind == PARAM else None
        if slot is not None and layout.buckets[slot.bucket].axis is not None:
            found.setdefault(slot.bucket, set()).add(stage)
    return {bucket: frozenset(stages) for bucket, stages in found.items()}


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts)) if parts[0].dim() else torch.stack(list(parts))
