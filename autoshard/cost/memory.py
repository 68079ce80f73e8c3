"""Bytes that one rank of each stage holds at its peak, by name, read off the program's graphs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Node

from autoshard.cost.liveness import peak_bytes, storage_of
from autoshard.ir.graph_function import BOUNDARY, GRAD, PARAM, SAVED, GraphFunction
from autoshard.ir.params import Flat, ParamSpec
from autoshard.ir.program import Program, Stage
from autoshard.schedule.action import Kind

OPTIMIZER_BYTES = {"adamw": 8, "adam": 8, "sgd": 0, "sgd_momentum": 4}  # per owned element


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one rank of one stage; ``in_flight`` is the peak number of held micro-batches."""

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int  # saved values and boundary inputs of all micro-batches in flight
    temporary: int  # peak inside one graph, gather buffers included
    in_flight: int

    @property
    def total(self) -> int:
        """Return the sum: an upper bound, the peaks need not coincide."""
        parts = (self.parameters, self.gradients, self.optimizer, self.activations, self.temporary)
        return sum(parts)


def memory(program: Program, optimizer: str = "adamw") -> tuple[StageMemory, ...]:
    """Return the memory of one rank of every stage; the program is at level SCHEDULE."""
    return tuple(_stage_memory(program, stage, optimizer) for stage in program.stages)


def in_flight(program: Program, stage: int) -> int:
    """Return the largest number of micro-batches whose saved values ``stage`` holds at once."""
    if program.schedule is None:
        return 1
    held = peak = 0
    for _, _, action in program.schedule.positions():
        if action.stage != stage:
            continue
        held += (action.kind is Kind.F) - (action.kind in (Kind.W, Kind.B))
        peak = max(peak, held)
    return peak


def stored_elements(program: Program, stage: Stage, spec: ParamSpec) -> int:
    """Return how many elements of a parameter one rank of a stage stores all the time.

    All of them where the forward graph reads the parameter itself, a shard where it gathers it.
    """
    forward = stage.phases.get("F")
    is_gathered = forward is not None and forward.node(PARAM, spec.fqn) is None
    if isinstance(spec.storage, Flat) and is_gathered:
        return owned_elements(program, spec)
    return _local_elements(program, spec)


def owned_elements(program: Program, spec: ParamSpec) -> int:
    """Return how many elements of a parameter one rank's optimizer updates."""
    whole = _local_elements(program, spec)
    for bucket in program.buckets:
        if spec.fqn in bucket.fqns and bucket.axis is not None:
            return -(-whole // program.mesh.size(bucket.axis))
    return whole


def _stage_memory(program: Program, stage: Stage, optimizer: str) -> StageMemory:
    specs = [s for s in program.params if stage.index in s.homes]
    trained = [s for s in specs if s.requires_grad and not s.is_buffer]
    owned = sum(owned_elements(program, s) for s in trained)
    flight = in_flight(program, stage.index)
    forward = stage.phases.get("F")
    kept = () if forward is None else _kept(forward)
    return StageMemory(
        stage.index,
        parameters=sum(_read_bytes(program, stage, s) for s in specs),
        gradients=sum(
            _gradient_elements(stage, program, s) * _gradient_itemsize(program, s) for s in trained
        ),
        optimizer=owned * OPTIMIZER_BYTES[optimizer]
        + sum(_master_bytes(program, stage, s) for s in specs),
        activations=flight * _distinct_bytes(kept),
        temporary=max((peak_bytes(f.graph) for f in stage.phases.values()), default=0),
        in_flight=flight,
    )


def _read_bytes(program: Program, stage: Stage, spec: ParamSpec) -> int:
    """Return what the parameter takes as phases read it, not gathered."""
    if spec.read_dtype == spec.dtype:
        return stored_elements(program, stage, spec) * spec.dtype.itemsize
    is_whole = stage.phases["F"].node(PARAM, spec.fqn) is not None
    return _local_elements(program, spec) * spec.read_dtype.itemsize if is_whole else 0


def _master_bytes(program: Program, stage: Stage, spec: ParamSpec) -> int:
    """Return what the copy takes that the optimizer updates; 0 where it is the parameter."""
    if spec.read_dtype == spec.dtype:
        return 0
    return owned_elements(program, spec) * spec.dtype.itemsize


def _gradient_itemsize(program: Program, spec: ParamSpec) -> int:
    precision = program.precision
    return (spec.dtype if precision is None else precision.grads).itemsize


def _gradient_elements(stage: Stage, program: Program, spec: ParamSpec) -> int:
    """Return accumulated gradient elements: a shard where each micro-batch is reduced at once."""
    graphs = (stage.phases[phase] for phase in ("I", "W") if phase in stage.phases)
    is_whole = any(graph.result(GRAD, spec.fqn) is not None for graph in graphs)
    return _local_elements(program, spec) if is_whole else owned_elements(program, spec)


def _kept(forward: GraphFunction) -> list[Node]:
    saved = list(forward.named_results(SAVED).values())
    return [n for n in (*saved, *forward.named(BOUNDARY).values()) if n is not None]


def _distinct_bytes(nodes: Iterable[Node]) -> int:
    sizes = {}
    for node in nodes:
        for key, nbytes in storage_of(node):
            sizes[key] = max(sizes.get(key, 0), nbytes)
    return sum(sizes.values())


def _local_elements(program: Program, spec: ParamSpec) -> int:
    count = 1
    for extent in spec.local_shape(program.mesh):
        count *= extent
    return count
