"""Predict a rank's peak of memory as if forward handed some gathered buckets on to backward.

So what to keep is chosen by the very replay that `inspect` prints, without rewriting anything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from autoshard.cost.footprint import EXTRA, Footprint, Step, Storage, footprint
from autoshard.cost.peak import Peak
from autoshard.cost.replay import peak_of
from autoshard.cost.traffic import tensor_bytes
from autoshard.ir.buckets import gathers_of, kept_port
from autoshard.ir.graph_function import GraphFunction
from autoshard.ir.program import Program

Kept = Mapping[int, Collection[str]]  # stage -> buckets that its forward hands on


class KeptPeaks:
    """The peaks of one program's ranks; each graph is read once."""

    def __init__(self, program: Program) -> None:
        """Take a program that has a schedule."""
        self._program = program
        away = {bucket.name for bucket in program.buckets if bucket.is_fetched}
        self._fetched = frozenset(away)
        self._known: dict[tuple[int, str], Footprint] = {}

    def of(self, rank: int, kept: Kept) -> Peak:
        """Return the peak of a rank at pipeline coordinate ``rank`` if it kept so much."""

        def profile(stage: int, phase: str) -> Footprint:
            known = self._footprint(stage, phase)
            function = self._program.stages[stage].phases[phase]
            names = [n for n in gathers_of(function) if n in kept.get(stage, ())]
            if not names or phase in ("U", "R"):
                return known
            return hand_on(known, function, names) if phase == "F" else take(known, function, names)

        return peak_of(self._program, rank, profile=profile)

    def _footprint(self, stage: int, phase: str) -> Footprint:
        if (stage, phase) not in self._known:
            function = self._program.stages[stage].phases[phase]
            found = footprint(function, self._program.mesh, self._fetched)
            self._known[stage, phase] = found
        return self._known[stage, phase]


def hand_on(known: Footprint, function: GraphFunction, names: Collection[str]) -> Footprint:
    """Return a forward's footprint if it returned buckets that it gathers."""
    gathers = gathers_of(function)
    places = {(gathers[name], 0): name for name in names}
    steps = [_without(step, frees=places) for step in known.steps]
    outputs = [(kept_port(name), place) for place, name in places.items()]
    return replace(known, steps=tuple(steps), outputs=(*known.outputs, *outputs))


def take(known: Footprint, function: GraphFunction, names: Collection[str]) -> Footprint:
    """Return a backward phase's footprint if it were handed buckets that it gathers."""
    gathers = gathers_of(function)
    places = {(gathers[name], leaf) for name in names for leaf in (0, EXTRA)}
    steps = [_without(step, makes=places) for step in known.steps]
    inputs = [(kept_port(name), (gathers[name], 0), tensor_bytes(gathers[name])) for name in names]
    return replace(known, steps=tuple(steps), inputs=(*known.inputs, *inputs))


def _without(step: Step, makes: Collection[Storage] = (), frees: Collection[Storage] = ()) -> Step:
    return replace(
        step,
        makes=[made for made in step.makes if made[0] not in makes],
        frees=[freed for freed in step.frees if freed not in frees],
    )
