"""A stage's phase graphs as functions, and which per-micro-batch values die after which phase."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.ir.graph_function import (
    BOUNDARY,
    GRAD,
    SAVED,
    TANGENT,
    GraphFunction,
    Port,
)
from autoshard.ir.lifetimes import lifetimes
from autoshard.ir.program import PER_MICROBATCH, Program, Stage
from autoshard.runtime.codegen import Compiled, generate
from autoshard.runtime.inductor import Inductor

KEPT = frozenset({SAVED, BOUNDARY, TANGENT})  # kinds that live from one action to another


@dataclass(frozen=True)
class Phase:
    """One phase graph, ready to run."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    call: Compiled
    last: frozenset[Port]  # inputs that no later phase of the micro-batch reads
    gives: bool  # takes a function that it gives its gradients to
    returned: frozenset[int]  # places of the outputs that have a value when it returns


Code = dict[tuple[int, str], Phase]  # (stage, phase) -> its function


def generate_code(
    program: Program,
    stages: Iterable[int] | None = None,
    inductor: Inductor | None = None,
) -> Code:
    """Generate every phase of the given stages, or of all: ranks of one process can share those."""
    wanted = program.stages if stages is None else [program.stages[index] for index in stages]
    return {
        (stage.index, name): phase
        for stage in wanted
        for name, phase in _stage_phases(stage, program.kernels, inductor).items()
    }


def _stage_phases(stage: Stage, kernels: str, inductor: Inductor | None) -> dict[str, Phase]:
    phases = {}
    for name, function in stage.phases.items():
        body = function if inductor is None else inductor.compiled(function)
        call = generate(body, f"stage{stage.index}_{name}", kernels)
        last = _last_reads(stage.phases, name)
        ports = function.inputs, function.outputs
        phases[name] = Phase(*ports, call, last, function.makes_gradients, _returned(body))
    return phases


def _returned(function: GraphFunction) -> frozenset[int]:
    """Return the places of outputs but those without a value and gradients given away before."""
    pairs = zip(function.outputs, function.results, strict=True)
    handed = lifetimes(function).handed
    return frozenset(
        place
        for place, (port, node) in enumerate(pairs)
        if node is not None and not (port.kind == GRAD and node in handed)
    )


def _last_reads(phases: dict[str, GraphFunction], name: str) -> frozenset[Port]:
    if name not in PER_MICROBATCH:
        return frozenset()
    later = [phases[p] for p in PER_MICROBATCH[PER_MICROBATCH.index(name) + 1 :] if p in phases]
    needed = {port for function in later for port in function.inputs}
    return frozenset(p for p in phases[name].inputs if p.kind in KEPT and p not in needed)
