"""The engine: what a user's training loop calls."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn
from torch.fx import GraphModule

from autoshard.cost.peak import Peak
from autoshard.diagnostics import AutoshardError, CheckpointError
from autoshard.ir.batch import batch_leaves
from autoshard.ir.program import Program
from autoshard.mesh import Mesh
from autoshard.ops.collectives import neighbours
from autoshard.runtime.agree import Call, agree_on_batch
from autoshard.runtime.batch import Leaves, Signature, batch_signature, check_rows, split_leaves
from autoshard.runtime.clip import clip_grad_norm
from autoshard.runtime.comm import ProcessGroups
from autoshard.runtime.control import Control
from autoshard.runtime.device import Allocator, to_device, watch_allocator
from autoshard.runtime.executor import Executable
from autoshard.runtime.fingerprint import compare_fingerprints, take_fingerprint
from autoshard.runtime.init import Init, check_init, fill
from autoshard.runtime.layout import bucket_stages, scheduled
from autoshard.runtime.ledger import Ledger, hold_state, measured
from autoshard.runtime.link import link
from autoshard.runtime.optimizer_check import OptimizerCheck
from autoshard.runtime.report import Report
from autoshard.runtime.state_dict import gather_state, load_state
from autoshard.source import Span

Key = tuple[bool, Signature]  # (training, signature of a micro-batch)


class Compile(Protocol):
    """How the engine gets a program: ``parallelize`` brings the compiler."""

    def __call__(self, batch: object, training: bool) -> Program:
        """Return the lowered program for the shapes of ``batch``."""


class Graph(Protocol):
    """How the engine gets a graph to show."""

    def __call__(self, until: str, stage: int) -> GraphModule:
        """Return a stage's graph as it is after a pass or a group."""


@dataclass(frozen=True)
class Setup:
    """What ``parallelize`` hands to the engine: the plan's numbers, and the way to the compiler."""

    plan_text: str
    micro_batch_size: int
    num_microbatches: int
    compile: Compile
    graph: Graph
    names: tuple[str, ...]  # of the plain model's state dict
    batch_span: Span | None = None
    init: Init | None = None
    notes: tuple[str, ...] = ()
    optimizer: str = "adamw"  # that the memory report assumes


@dataclass
class Counters:
    """What ``stats`` reports."""

    steps: int = 0
    evaluations: int = 0
    seconds: float = 0.0  # of the last step
    samples: int = 0  # of the last step, all data parallel ranks together
    waited: float = 0.0  # seconds of the last step in which this rank waited for others
    sent: int = 0  # bytes of the last step, over gloo


class Engine:
    """Runs training steps of one rank. Made by ``autoshard.parallelize``.

    All ranks make the same calls in the same order.
    """

    def __init__(
        self,
        setup: Setup,
        program: Program,
        example: object,
        tensors: Mapping[str, torch.Tensor],
        control: Control,
        device: torch.device,
    ) -> None:
        """Link ``program``, which was compiled for ``example``, and take the model's values over.

        ``tensors`` are the model's parameters and buffers by canonical name.
        """
        compare_fingerprints(control, take_fingerprint(setup.plan_text, program))
        self._setup, self._control = setup, control
        self._comm = ProcessGroups(program.mesh, control.rank, device, subsets=_subsets(program))
        self._seed = control.gather([torch.initial_seed() >> 1])[0][0]
        self._counters = Counters()
        self._programs: dict[Key, Executable] = {}
        exe = self._first = link(program, self._comm)
        self._storage = exe.storage
        self._programs[True, self._signature_of_example(batch_leaves(example))] = exe
        control.together(lambda: check_init(program, tensors, setup.init))
        self._unset = fill(program, self._storage, tensors, setup.init, control, self._seed)
        on_step = self._storage.stepped if self._storage.scaler else None
        parameters = self._storage.parameters.values()
        self._check = OptimizerCheck(parameters, control.size, on_step)
        self._checked: set[str] = set()
        self._measured: Peak | None = None
        self._allocator: Allocator | None = None

    # training -----------------------------------------------------------------------------------
    def forward_backward(self, batch: object, weight: float = 1.0) -> torch.Tensor:
        """Run all micro-batches forward and backward and return the loss of the global batch.

        ``batch`` is the local batch of this data parallel rank, a dict or tuple. Gradients are
        added to ``.grad``, scaled by ``weight``; the returned loss is not scaled.
        """
        begin, clock = time.perf_counter(), replace(self._comm.clock)
        leaves, exe = self._prepare("forward_backward", batch)
        parts = split_leaves(leaves, exe.program.leaves, exe.program.num_microbatches)
        loss = exe.step(parts, weight, seed=self._seed, index=self._counters.steps)
        self._counters.steps += 1
        self._counters.samples = self._local_rows * self.dp_size
        self._counters.seconds = time.perf_counter() - begin
        self._counters.waited = self._comm.clock.seconds - clock.seconds
        self._counters.sent = self._comm.clock.sent - clock.sent
        return loss

    def evaluate(self, batch: object) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return the global loss in eval mode, without gradients (outputs where there is no loss).

        ``batch`` has the size of a training batch.
        """
        leaves, exe = self._prepare("evaluate", batch)
        parts = split_leaves(leaves, exe.program.leaves, exe.program.num_microbatches)
        self._counters.evaluations += 1
        return exe.evaluate(parts)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip by the norm of the whole model's gradient and return it, as torch's does."""
        return clip_grad_norm(self._storage, self._comm, max_norm, norm_type, error_if_nonfinite)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients (or zero them), as torch's does."""
        self._storage.stepped()
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    # parameters ---------------------------------------------------------------------------------
    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's parts of the parameters: views of flat buffers, for any optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parts under the model's own names; tied parameters come once.

        Where data parallel ranks store shards they are 1-D, and empty where a rank has none.
        """
        yield from self._storage.parameters.items()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the plain model's state dict on rank 0, an empty dict on the others.

        Names, shapes and ties are those of the model that ``parallelize`` was given.
        """
        self._require_values()
        return gather_state(self._first.program, self._storage, self._comm, self._setup.names)

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """Load a plain model's state dict, strictly: all that doesn't fit is listed, nothing done.

        Either every rank gives the dict, or rank 0 does and the others give None or {}.
        """
        program, names = self._first.program, self._setup.names
        load_state(program, self._storage, self._control, names, state or {})
        self._unset -= {program.params[name].fqn for name in names}

    def rng_state(self) -> dict[str, int]:
        """Return what dropout masks follow from: the seed, and the number of the next step.

        The same on all ranks. Save it beside the parameters and the optimizer's state: a resumed
        run draws the masks that the uninterrupted one would have drawn.
        """
        return {"seed": self._seed, "step": self._counters.steps}

    def load_rng_state(self, state: Mapping[str, int]) -> None:
        """Go on drawing masks as the run did that gave ``state``; all ranks give the same."""
        if set(state) != {"seed", "step"} or not all(
            isinstance(v, int) and v >= 0 for v in state.values()
        ):
            raise CheckpointError(
                f"this is no state of random numbers: {dict(state)}",
                help="give what engine.rng_state() returned",
            )
        self._seed, self._counters.steps = state["seed"], state["step"]

    # what it is ---------------------------------------------------------------------------------
    @property
    def mesh(self) -> Mesh:
        """Return the mesh of the plan."""
        return self._comm.mesh

    @property
    def dp_rank(self) -> int:
        """Return this rank's data parallel coordinate: key the data by it."""
        return self._comm.index("dp")

    @property
    def dp_size(self) -> int:
        """Return the number of data parallel coordinates."""
        return self._comm.size("dp")

    def graph(self, pass_or_group: str, stage: int = 0) -> GraphModule:
        """Return the training graph of a stage as it is after a pass or a group of passes."""
        return self._setup.graph(pass_or_group, stage)

    @contextmanager
    def measure_memory(self) -> Iterator[None]:
        """Count the bytes of live tensors in the steps inside; ``report`` then shows their peak.

        Such steps are slow: every operator passes through Python. Make the optimizer's first step
        before, so that its state is there, and drop gradients. On CUDA the peak of torch's
        allocator is read too.
        """
        ledger = Ledger()
        hold_state(ledger, self._storage, self._check.states())
        read_allocator = watch_allocator(self._comm.device)
        with measured(self._programs.values(), ledger):
            yield
        self._measured, self._allocator = ledger.peak, read_allocator()

    def report(self) -> Report:
        """Return what this rank runs and keeps, as text: its memory as predicted, and measured."""
        setup = self._setup
        signatures = tuple(self._programs)
        found = (self._measured, self._allocator)
        return Report.of(self._first, signatures, setup.notes, setup.optimizer, *found)

    def stats(self) -> dict[str, float]:
        """Return numbers of the last step and counts since the start, for any tracker."""
        counters, scaler = self._counters, self._storage.scaler
        seconds = counters.seconds
        return {
            "steps": counters.steps,
            "evaluations": counters.evaluations,
            "programs": len(self._programs),
            "step_seconds": seconds,
            "waited_seconds": counters.waited,
            "sent_bytes": counters.sent,
            "samples_per_second": counters.samples / seconds if seconds else 0.0,
            "stored_bytes": self._storage.nbytes(),
            **self._first.counts,  # actions, launches, copies, collectives, messages of a step
            **({} if self._measured is None else {"peak_bytes": self._measured.total}),
            **({} if self._allocator is None else {"cuda_bytes": self._allocator.allocated}),
            **({} if scaler is None else {"loss_scale": scaler.scale, "overflows": scaler.skipped}),
        }

    # private ------------------------------------------------------------------------------------
    @property
    def _local_rows(self) -> int:
        return self._setup.micro_batch_size * self._setup.num_microbatches

    def _prepare(self, kind: str, batch: object) -> tuple[Leaves, Executable]:
        """Return leaves and the program for them, once all ranks agree."""
        training = kind == "forward_backward"
        number = self._counters.steps if training else self._counters.evaluations
        call = Call(kind, number, compare_values=kind not in self._checked)
        leaves = agree_on_batch(self._control, self.mesh, call, lambda: self._take(batch))
        self._checked.add(kind)
        key = (training, batch_signature(leaves, self._setup.num_microbatches))
        if key not in self._programs:
            program = self._control.together(lambda: self._setup.compile(batch, training))
            compare_fingerprints(self._control, take_fingerprint("", program))
            self._programs[key] = link(program, self._comm, storage=self._storage)
        return leaves, self._programs[key]

    def _take(self, batch: object) -> Leaves:
        self._require_values()
        leaves = batch_leaves(batch)
        setup = self._setup
        check_rows(leaves, setup.micro_batch_size, setup.num_microbatches, setup.batch_span)
        return {name: to_device(value, self._comm.device) for name, value in leaves.items()}

    def _signature_of_example(self, leaves: Leaves) -> Signature:
        """Return the signature of an example, which may be one micro-batch or a whole batch."""
        rows = max((value.shape[0] for value in leaves.values() if value.dim()), default=1)
        is_whole = rows == self._local_rows
        return batch_signature(leaves, self._setup.num_microbatches if is_whole else 1)

    def _require_values(self) -> None:
        if self._unset:
            names = sorted(self._unset)
            raise AutoshardError(
                f"{len(names)} parameters have no values yet, '{names[0]}' among them:"
                " the model is on the meta device",
                help="give parallelize(init=), or call load_full_state_dict first",
            )


def _subsets(program: Program) -> dict[str, list[tuple[int, ...]]]:
    """Return by axis the coordinates that reduce among themselves."""
    size = program.mesh.size("tp")
    times = {spec.copies.times for spec in program.params if spec.copies}
    heads = {neighbours(index, n) for n in times for index in range(size)}
    return {"pp": _tied(program), "tp": sorted(heads)}


def _tied(program: Program) -> list[tuple[int, ...]]:
    """Return the pipeline coordinates that share tied parameters, for groups of their own."""
    ranks = scheduled(program).stage_to_rank
    stages = [bucket_stages(bucket) for bucket in program.buckets]
    return [tuple(sorted({ranks[s] for s in homes})) for homes in stages if len(homes) > 1]
