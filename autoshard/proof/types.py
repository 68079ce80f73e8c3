"""Re-infer every placement over the lowered graphs, forward and backward, and check the ends.

Passes and this checker share the rule table but nothing else: here no conversion is allowed, an
operand must already lie as its rule wants it. The ends are then fixed by the model alone: a
parameter's gradient lies as the parameter over tp and is Partial over dp until it is reduced, the
loss is whole over tp and Partial over dp, no Partial crosses a stage boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from autoshard.diagnostics import AutoshardError
from autoshard.ir.decide import Axis, Value
from autoshard.ir.graph_function import (
    BOUNDARY,
    FLAT,
    FLAT_GRAD,
    FULL,
    FULL_GRAD,
    GRAD,
    LOSS,
    SAVED,
    TANGENT,
    GraphFunction,
    Port,
)
from autoshard.ir.infer import Inference, is_zero
from autoshard.ir.invariants import CHECKERS
from autoshard.ir.placement import PARTIAL, REPLICATE, Partial, Placement, Shard
from autoshard.ir.program import Bucket, Program, Stage
from autoshard.ir.sources import cotangent, source_placement, stored_placement
from autoshard.proof.axes import check_shared, check_sizes, packed_of
from autoshard.proof.compute_types import check_compute_types
from autoshard.proof.norm import check_norm
from autoshard.proof.number_types import check_number_types

COMPUTE_PHASES = ("F", "I", "W")
OWNERS = frozenset({"params_placed", "staged", "gathered", "bucketed", "bounded"})
Placed = dict[Node, Value | tuple[Value, ...]]  # node of any phase -> placement(s) of its value(s)


@dataclass
class TypeFindings:
    """What the check of one axis found; ``unproven`` maps an operator's name to its count."""

    wrong: list[str] = field(default_factory=list)
    unproven: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)  # read a value of unknown placement
    nodes: int = 0  # nodes whose placement was inferred
    placed: dict[str, Placed] = field(default_factory=dict)  # by axis


def check_types(program: Program) -> TypeFindings:
    """Check all stages and axes of a program at level JOINT or below."""
    findings = TypeFindings()
    findings.wrong += _broken_invariants(program)
    if not findings.wrong and program.training:
        findings.wrong += check_norm(program)
    findings.wrong += [*check_sizes(program), *check_shared(program)]
    findings.wrong += [*check_number_types(program), *check_compute_types(program)]
    for name in _axes(program):
        size = max(program.mesh.size(name), 2)
        _check_axis(program, Axis(name, size, size), findings)
    return findings


def _axes(program: Program) -> list[str]:
    """Return the axes along which values may differ: hybrid data parallel ones each by itself."""
    mesh = program.mesh
    found = [name for name in ("tp", *(mesh.members("dp") or ("dp",))) if mesh.size(name) > 1]
    # Micro-batches lie as data parallel ranks do; two terms stand for any number.
    alone = program.num_microbatches > 1 and mesh.size("dp") == 1
    return [*found, "dp"] if alone else found


def _broken_invariants(program: Program) -> Iterator[str]:
    """Re-check the invariants that say who owns, stores and gathers each parameter."""
    for name in sorted(OWNERS & program.holds):
        try:
            CHECKERS[name](program)
        except AutoshardError as error:
            yield f"invariant '{name}': {error}"


def _check_axis(program: Program, axis: Axis, findings: TypeFindings) -> None:
    boundary: dict[str, Value] = {}
    for stage in program.stages:
        boundary = _check_stage(program, stage, axis, boundary, findings)
        if axis.is_data and program.mesh.size(axis.name) > 1:
            _check_storage(program, stage, axis, findings)


def _check_stage(
    program: Program,
    stage: Stage,
    axis: Axis,
    received: Mapping[str, Value],
    findings: TypeFindings,
) -> dict[str, Value]:
    """Check one stage's phases in order and return the placements of what it sends on."""
    saved: dict[str, Value] = {}
    makers: dict[str, Node] = {}  # of saved values
    buckets: dict[str, str | None] = {}  # saved values that are a gathered bucket
    readings: dict[str, tuple[Placement, ...]] = {}  # of saved views that read in several ways
    sent: dict[str, Value] = {}
    for phase in COMPUTE_PHASES:
        function = stage.phases.get(phase)
        if function is None:
            continue
        run = Inference(program, axis)
        for port, node in zip(function.inputs, function.placeholders, strict=True):
            run.env[node] = source_placement(program, axis, port, received, sent, saved)
            if port.kind == SAVED and port.name in makers:
                run.origins[node] = makers[port.name]
                run.flat |= {node: buckets[port.name]} if buckets[port.name] else {}
                run.readings |= {node: readings[port.name]} if port.name in readings else {}
        run.walk(function)
        where = f"stage {stage.index}, {phase}, {axis.name}"
        _record(findings, where, run)
        findings.placed.setdefault(axis.name, {}).update(run.env)
        saved |= _named(function, SAVED, run)
        made = {n: node for n, node in function.named_results(SAVED).items() if node}
        makers |= made
        buckets |= {n: run.bucket_of(node) for n, node in made.items()}
        readings |= {n: run.readings[node] for n, node in made.items() if node in run.readings}
        sent |= _named(function, BOUNDARY, run)
        ends = _check_ends(program, function, axis, run, received)
        findings.wrong += [f"{where}: {text}" for text in ends]
    return sent


def _record(findings: TypeFindings, where: str, run: Inference) -> None:
    findings.wrong += [f"{where}: {text}" for text in run.wrong]
    findings.nodes += sum(value is not None for value in run.env.values())
    for total, counts in ((findings.unproven, run.unproven), (findings.unknown, run.unknown)):
        for op, count in counts.items():
            total[op] = total.get(op, 0) + count


def _check_storage(program: Program, stage: Stage, axis: Axis, findings: TypeFindings) -> None:
    """Check that R reduces each gradient exactly once along the axis, and that U gathers."""
    for phase in ("R", "U"):
        function = stage.phases.get(phase)
        if function is None:
            continue
        run = Inference(program, axis)
        buckets = {bucket.name: bucket for bucket in program.buckets}
        for port, node in zip(function.inputs, function.placeholders, strict=True):
            run.env[node] = _left(port, buckets[port.name], axis)
        run.walk(function)
        where = f"stage {stage.index}, {phase}, {axis.name}"
        _record(findings, where, run)
        for port, node in zip(function.outputs, function.results, strict=True):
            whole = port.kind in (FULL, FULL_GRAD)
            want = REPLICATE if whole else stored_placement(buckets[port.name], axis)
            have = run.env.get(node)
            if have is not None and want is not None and have != want:
                findings.wrong.append(f"{where}: {port} is {have} and must be {want}")


def _left(port: Port, bucket: Bucket, axis: Axis) -> Value:
    """Return how R or U finds a bucket along a data parallel axis: as it is stored, or made."""
    stored = stored_placement(bucket, axis)
    if port.kind == FLAT:
        return stored
    return stored if port.kind == FLAT_GRAD and isinstance(stored, Shard) else PARTIAL


def _named(function: GraphFunction, kind: str, run: Inference) -> dict[str, Value]:
    named = function.named_results(kind).items()
    return {name: run.env[node] for name, node in named if node is not None}


def _check_ends(
    program: Program,
    function: GraphFunction,
    axis: Axis,
    run: Inference,
    received: Mapping[str, Value],
) -> Iterator[str]:
    for port, node in zip(function.outputs, function.results, strict=True):
        value = run.env.get(node) if node is not None else None
        if port.kind == FLAT_GRAD and node is not None:
            yield from _check_packed(program, axis, port.name, node, run)
            continue
        if value is None:
            continue
        if port.kind == BOUNDARY and not _may_cross(run, node):
            yield f"'{port.name}' crosses the stage boundary as a partial sum"
        expected = _expected(program, axis, port.kind, port.name, received)
        if expected is not None and expected not in run.all_readings(node):
            yield f"{port.kind} '{port.name}' is {value} and must be {expected}"


def _may_cross(run: Inference, node: Node) -> bool:
    return any(not isinstance(placement, Partial) for placement in run.all_readings(node))


def _check_packed(
    program: Program, axis: Axis, bucket_name: str, node: Node, run: Inference
) -> Iterator[str]:
    """Check each gradient that was packed in a flat bucket, and that dp reduced the bucket."""
    packed = packed_of(node)
    bucket = next(b for b in program.buckets if b.name == bucket_name)
    values = packed.all_input_nodes if packed is not None else []
    if len(values) != len(bucket.fqns):
        return
    for name, value in zip(bucket.fqns, values, strict=True):
        have, want = run.env[value], _expected(program, axis, GRAD, name, {})
        if is_zero(value):
            continue
        if have is not None and want not in run.all_readings(value):
            yield f"{GRAD} '{name}' is {have} and must be {want}"
    reduced = _left(Port(FLAT_GRAD, bucket_name), bucket, axis)
    if axis.is_data and run.env[node] not in (None, reduced):
        yield f"{FLAT_GRAD} '{bucket_name}' is {run.env[node]} and must be {reduced}"


def _expected(
    program: Program, axis: Axis, kind: str, name: str, received: Mapping[str, Value]
) -> Placement | None:
    """Return how an output must lie, None where nothing is known."""
    if kind == LOSS:
        return PARTIAL if axis.is_data else REPLICATE
    if kind == GRAD:
        placement = program.params[name].placements.get(axis.name, REPLICATE)
        return PARTIAL if axis.is_data else placement
    if kind == TANGENT and received.get(name) is not None:
        return cotangent(axis, received[name])
    return None
