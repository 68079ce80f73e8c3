"""A stage's phase graphs as functions, and which per-micro-batch values die after which phase."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir.graph_function import (
    BOUNDARY,
    SAVED,
    TANGENT,
    GraphFunction,
    Port,
)
from autoshard.ir.program import Program, Stage
from autoshard.runtime.codegen import Compiled, generate

PER_MICROBATCH = ("F", "I", "W")  # in the order in which they run
KEPT = frozenset({SAVED, BOUNDARY, TANGENT})  # kinds that live from one action to another


@dataclass(frozen=True)
class Phase:
    """One phase graph, ready to run."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    call: Compiled
    last: frozenset[Port]  # inputs that no later phase of the micro-batch reads
    gives: bool  # takes a function that it gives its gradients to


Code = dict[tuple[int, str], Phase]  # (stage, phase) -> its function


def generate_code(program: Program) -> Code:
    """Generate every phase of every stage; ranks of one process can share the result."""
    return {
        (stage.index, name): phase
        for stage in program.stages
        for name, phase in _stage_phases(stage, program.kernels).items()
    }


def _stage_phases(stage: Stage, kernels: str) -> dict[str, Phase]:
    phases = {}
    for name, function in stage.phases.items():
        call = generate(function, f"stage{stage.index}_{name}", kernels)
        last = _last_reads(stage.phases, name)
        ports = function.inputs, function.outputs
        phases[name] = Phase(*ports, call, last, function.makes_gradients)
    return phases


def _last_reads(phases: dict[str, GraphFunction], name: str) -> frozenset[Port]:
    if name not in PER_MICROBATCH:
        return frozenset()
    later = [phases[p] for p in PER_MICROBATCH[PER_MICROBATCH.index(name) + 1 :] if p in phases]
    needed = {port for function in later for port in function.inputs}
    return frozenset(p for p in phases[name].inputs if p.kind in KEPT and p not in needed)
