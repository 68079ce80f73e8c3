"""Program: the one mutable artifact that is rewritten, inspected, verified, simulated and run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum

import torch

from autoshard.ir.graph_function import GraphFunction
from autoshard.ir.params import ParamTable
from autoshard.ir.precision import Precision
from autoshard.mesh import Mesh
from autoshard.schedule import Schedule

PER_MICROBATCH = ("F", "I", "W")  # phases, in the order in which they run
PHASES = ("F", "I", "W", "U", "R")  # forward, input gradient, weight gradient, unshard, reduce


class Level(IntEnum):
    """How far a program has come down."""

    FORWARD = 1  # one typed forward graph, or one forward graph per stage
    JOINT = 2  # per stage: joint graph, then its phases
    SCHEDULE = 3  # per rank: a list of actions


@dataclass(frozen=True)
class BatchLeaf:
    """One leaf of the micro-batch; ``is_split`` leaves are cut on dim 0 into micro-batches."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_split: bool = True


@dataclass(frozen=True)
class Bucket:
    """Parameters of one stage that are stored, gathered and reduced as one flat buffer."""

    name: str  # "s0.transformer.h.0"
    stage: int
    fqns: tuple[str, ...]
    length: int  # elements, padded to a multiple of the axis size
    dtype: torch.dtype
    axis: str | None  # "dp" or "dp_shard" when cut in shards, None when every rank keeps all
    tied_stages: tuple[int, ...] = ()  # all home stages when its parameters are tied over stages
    computed_in: torch.dtype | None = None  # of the gathered bucket; None: as it is stored
    summed_in: torch.dtype | None = None  # of its gradient's sum; None: as it is stored
    on_host: bool = False  # stored in host memory, where the device has memory of its own
    is_fetched: bool = False  # each gather copies the shard from there: no copy is kept

    @property
    def read_dtype(self) -> torch.dtype:
        """Return the dtype in which phases read the bucket; ``dtype`` is how it is stored."""
        return self.computed_in or self.dtype

    @property
    def replicas(self) -> str | None:
        """Return the axis along which ranks store the same part, None where all differ."""
        if self.axis is None:
            return "dp"
        return "dp_replicate" if self.axis == "dp_shard" else None

    @property
    def flat_dtype(self) -> torch.dtype:
        """Return the dtype in which graphs take the stored bucket in: the host casts its own."""
        return self.read_dtype if self.on_host else self.dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """Return the dtype in which its gradients are summed over micro-batches."""
        return self.summed_in or self.dtype


@dataclass
class Stage:
    """One pipeline stage: its forward graph, then its joint graph, then its phase graphs."""

    index: int
    forward: GraphFunction
    joint: GraphFunction | None = None
    phases: dict[str, GraphFunction] = field(default_factory=dict)  # keys from PHASES

    def clone(self) -> Stage:
        """Return an independent copy."""
        return replace(
            self,
            forward=self.forward.clone(),
            joint=None if self.joint is None else self.joint.clone(),
            phases={name: function.clone() for name, function in self.phases.items()},
        )


@dataclass(frozen=True)
class JournalEntry:
    """What one pass did: counts before and after, seconds, number of remarks."""

    pass_text: str
    nodes: int
    collectives: dict[str, int]
    seconds: float
    remarks: int


@dataclass
class Program:
    """Graphs + ParamTable + Schedule for one model under one plan, and how it came to be."""

    mesh: Mesh
    params: ParamTable
    leaves: tuple[BatchLeaf, ...]
    training: bool
    num_microbatches: int = 1
    forward: GraphFunction | None = None  # until cut-stages
    prelude: GraphFunction | None = None  # batch leaves of one micro-batch -> COUNT outputs
    stages: list[Stage] = field(default_factory=list)
    buckets: tuple[Bucket, ...] = ()
    schedule: Schedule | None = None
    kernels: str = "auto"  # how fused ops run: "auto", or "reference" by torch's operators alone
    compiler: str = "off"  # of what stands between collectives: "off" or "inductor"
    precision: Precision | None = None  # None: every value as the model has it
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    compared: object | None = None  # ir.compare.CompareReport: the capture against eager
    level: Level = Level.FORWARD
    holds: set[str] = field(default_factory=set)  # names of the invariants that hold
    journal: list[JournalEntry] = field(default_factory=list)

    def functions(self) -> Iterator[tuple[str, GraphFunction]]:
        """Yield the program's current graphs with their names: "forward", "stage0.F" ..."""
        if self.prelude is not None:
            yield "prelude", self.prelude
        if self.forward is not None:
            yield "forward", self.forward
        for stage in self.stages:
            yield from self._stage_functions(stage)

    def fork(self, mesh: Mesh | None = None) -> Program:
        """Return an independent copy, for another mesh if given.

        One capture can so be compiled for many plans, and a compiled program broken on trial.
        """
        return replace(
            self,
            mesh=mesh or self.mesh,
            params=self.params.clone(),
            forward=None if self.forward is None else self.forward.clone(),
            prelude=None if self.prelude is None else self.prelude.clone(),
            constants=dict(self.constants),
            stages=[stage.clone() for stage in self.stages],
            holds=set(self.holds),
            journal=list(self.journal),
        )

    @staticmethod
    def _stage_functions(stage: Stage) -> Iterator[tuple[str, GraphFunction]]:
        prefix = f"stage{stage.index}"
        if stage.phases:
            for phase, function in stage.phases.items():
                yield f"{prefix}.{phase}", function
        elif stage.joint is not None:
            yield f"{prefix}.joint", stage.joint
        else:
            yield f"{prefix}.forward", stage.forward
