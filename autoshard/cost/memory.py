"""Bytes of model state that one rank of each stage holds, by name, read off the program's graphs.

What comes and goes within a step is in `cost.replay`.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir.graph_function import GRAD, PARAM
from autoshard.ir.params import Flat, ParamSpec
from autoshard.ir.program import Program, Stage
from autoshard.schedule.action import Kind

MOMENTS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd_momentum": 1}  # as large as the parameter


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one rank of one stage, as ZeRO counts: what is gathered for a step is parameters."""

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    in_flight: int  # the peak number of micro-batches held


def memory(program: Program, optimizer: str = "adamw") -> tuple[StageMemory, ...]:
    """Return the state of one rank of every stage; the program is at level SCHEDULE."""
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
    owned = sum(owned_elements(program, s) * s.dtype.itemsize for s in trained)
    return StageMemory(
        stage.index,
        parameters=sum(_read_bytes(program, stage, s) for s in specs),
        gradients=sum(
            _gradient_elements(stage, program, s) * _gradient_itemsize(program, s) for s in trained
        ),
        optimizer=owned * MOMENTS[optimizer] + sum(_master_bytes(program, stage, s) for s in specs),
        in_flight=in_flight(program, stage.index),
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


def _local_elements(program: Program, spec: ParamSpec) -> int:
    count = 1
    for extent in spec.local_shape(program.mesh):
        count *= extent
    return count
