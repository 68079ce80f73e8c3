"""The invariants of stored parameters and gathers, each a function that raises VerifyError."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from torch.fx import Node

from autoshard.diagnostics import VerifyError
from autoshard.ir.aliases import lifetime_end
from autoshard.ir.buckets import (
    COMPUTE_PHASES,
    buckets_of,
    gathers_of,
    has_replicas,
    kept_buckets,
    uncast,
)
from autoshard.ir.graph_function import FLAT, FLAT_GRAD, GRAD, PARAM, GraphFunction, Port
from autoshard.ir.invariants_pipeline import used_in
from autoshard.ir.node_info import origin
from autoshard.ir.params import Flat
from autoshard.ir.program import Bucket, Program, Stage
from autoshard.ops import collectives as ops

_GATHERS = (ops.all_gather, ops.all_gather_start)


def check_gathered(program: Program) -> None:
    """Check that cut parameters are read through gather and wait, gradients leave reduced."""
    for stage in program.stages:
        for phase in COMPUTE_PHASES:
            if phase in stage.phases:
                where = f"stage {stage.index} {phase}"
                _check_reads(stage.phases[phase], where)
        _check_sources(program, stage)


def _check_reads(function: GraphFunction, where: str) -> None:
    for name, flat in function.named(FLAT).items():
        for user in _readers(flat):
            if user.target not in _GATHERS:
                raise VerifyError(
                    f"{where}: %{user.name} reads the shard of `{name}` ungathered: {origin(user)}"
                )
            if user.target is ops.all_gather_start:
                _check_started(user, f"{where}: `{name}`")
    for name, node in function.named_results(FLAT_GRAD).items():
        made = node.args[0] if node.target is ops.wait else node
        if made.target not in (ops.reduce_scatter, ops.reduce_scatter_start):
            raise VerifyError(
                f"{where}: the gradient of `{name}` leaves without a reduce_scatter:"
                f" it is %{made.name} of {origin(made)}"
            )
        if made.target is ops.reduce_scatter_start:
            _check_started(made, f"{where}: the gradient of `{name}`")


def _readers(flat: Node) -> list[Node]:
    """Return what reads a shard, through a cast too."""
    found = []
    for user in flat.users:
        found += user.users if uncast(user) is not user else [user]
    return found


def _check_started(start: Node, what: str) -> None:
    waits = [user for user in start.users if user.target is ops.wait]
    if len(waits) != 1 or len(start.users) != 1:
        readers = ", ".join(f"%{user.name} in {origin(user)}" for user in start.users)
        raise VerifyError(
            f"{what} is started once but waited for {len(waits)} times; it is read by {readers}"
        )


def _check_sources(program: Program, stage: Stage) -> None:
    """Check that every parameter the phases read whole is stored whole or gathered by U.

    A tied one may be gathered for its stage by another of its homes.
    """
    for phase in COMPUTE_PHASES:
        function = stage.phases.get(phase)
        for fqn in function.named(PARAM) if function else ():
            entry = program.params[fqn]
            gathered = _ports(program, entry.homes or (stage.index,), "U", "outputs")
            if isinstance(entry.storage, Flat) and entry.storage.bucket not in gathered:
                raise VerifyError(
                    f"stage {stage.index} {phase} reads `{fqn}` whole, but only a part is stored"
                )


def _ports(program: Program, stages: Iterable[int], phase: str, side: str) -> set[str]:
    graphs = (program.stages[index].phases.get(phase) for index in stages)
    return {port.name for graph in graphs if graph is not None for port in getattr(graph, side)}


def check_bucketed(program: Program) -> None:
    """Check that every stored parameter has its own place in one bucket, reduced once."""
    for bucket in program.buckets:
        _check_places(bucket, program)
    counts = Counter(fqn for bucket in program.buckets for fqn in bucket.fqns)
    for entry in program.params:
        if entry.is_buffer or not entry.homes or not program.buckets:
            continue
        if counts[entry.fqn] != 1:
            raise VerifyError(f"`{entry.fqn}` lies in {counts[entry.fqn]} buckets")
    for stage in program.stages:
        _check_reduced_once(program, stage)


def _check_places(bucket: Bucket, program: Program) -> None:
    end = 0
    for fqn in bucket.fqns:
        entry = program.params[fqn]
        kept_by = bucket.tied_stages or (bucket.stage,)
        if kept_by != entry.homes:
            raise VerifyError(
                f"`{fqn}` is used by stages {list(entry.homes)} but bucket `{bucket.name}` "
                f"is kept by {list(kept_by)}{used_in(program, fqn)}"
            )
        if entry.storage.bucket != bucket.name or entry.storage.offset != end:
            raise VerifyError(
                f"`{fqn}` is at {entry.storage.bucket}+{entry.storage.offset}, "
                f"expected {bucket.name}+{end}"
            )
        if isinstance(entry.storage, Flat) != (bucket.axis is not None):
            raise VerifyError(f"`{fqn}` and bucket `{bucket.name}` disagree on being cut")
        end += math.prod(entry.local_shape(program.mesh))
    size = 1 if bucket.axis is None else program.mesh.size(bucket.axis)
    if not end <= bucket.length < end + size or bucket.length % size:
        raise VerifyError(f"bucket `{bucket.name}` of {bucket.length} holds {end} in {size} parts")


def _check_reduced_once(program: Program, stage: Stage) -> None:
    """Check that a data parallel gradient is reduced by the phases or by R, not by both."""
    phases = [stage.phases[p] for p in COMPUTE_PHASES if p in stage.phases]
    made = Counter(port for function in phases for port in function.outputs)
    for bucket in buckets_of(program, stage):
        by_phases = made[Port(FLAT_GRAD, bucket.name)]
        loose = [fqn for fqn in bucket.fqns if made[Port(GRAD, fqn)]]
        if by_phases > 1 or (by_phases and loose):
            raise VerifyError(f"stage {stage.index} reduces the gradient of `{bucket.name}` twice")
        # A tied one is reduced by the last tied stage of its rank.
        stages = range(len(program.stages)) if bucket.tied_stages else (stage.index,)
        by_r = _ports(program, stages, "R", "inputs")
        if loose and program.mesh.size("dp") > 1 and bucket.name not in by_r:
            raise VerifyError(f"stage {stage.index} never reduces the gradient of `{loose[0]}`")
        if by_phases and has_replicas(program, bucket) and bucket.name not in by_r:
            raise VerifyError(
                f"stage {stage.index} never sums `{bucket.name}` over {bucket.replicas}"
            )


def check_bounded(program: Program) -> None:
    """Check that every gathered bucket is released once, after its last use, or handed on."""
    for stage in program.stages:
        for phase in COMPUTE_PHASES:
            if phase in stage.phases:
                _check_releases(stage.phases[phase], f"stage {stage.index} {phase}")


def _check_releases(function: GraphFunction, where: str) -> None:
    order = {node: index for index, node in enumerate(function.graph.nodes)}
    found = kept_buckets(function)
    for name, start in gathers_of(function).items():
        if start.target is ops.all_gather_start:
            _check_started(start, f"{where}: `{name}`")
            (found[name],) = start.users
    for name, whole in found.items():
        last = lifetime_end(whole, order)
        if last.op != "output" and last.target is not ops.release:
            raise VerifyError(
                f"{where}: `{name}` is read by %{last.name} in {origin(last)},"
                " its release is not after it"
            )
        releases = sum(user.target is ops.release for user in whole.users)
        if releases != (last.op != "output"):
            raise VerifyError(f"{where}: `{name}` is released {releases} times")
