"""Where a phase's inputs come from and its outputs go, settled when a program is linked.

What is kept from one phase for another goes in drawers: all values that the same later phases
read lie in one tuple. So an action costs as much Python for a hundred kept values as for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from autoshard.diagnostics import InternalError
from autoshard.ir.graph_function import (
    BATCH,
    BOUNDARY,
    BUFFER,
    FLAT,
    NORMALIZER,
    PARAM,
    RNG,
    SAVED,
    TANGENT,
    Port,
)
from autoshard.ir.node_info import val
from autoshard.ir.program import PER_MICROBATCH, Stage
from autoshard.runtime.phases import Phase
from autoshard.runtime.storage import Storage

if TYPE_CHECKING:
    from autoshard.runtime.run import Run

Drawer = tuple[str, tuple[str, ...]]  # the phase that fills it, and those that read it
Held = dict[Any, Any]  # of one stage and micro-batch: Port -> value, Drawer -> values
Lookup = Callable[["Run", int], torch.Tensor]  # of a run and a micro-batch
Pick = Callable[[Any], tuple]  # of a sequence or mapping


class Wiring:
    """One phase of one stage on one rank."""

    def __init__(
        self,
        stage: Stage,
        name: str,
        phases: Mapping[str, Phase],
        storage: Storage,
        constants: Mapping[str, torch.Tensor],
    ) -> None:
        """Sort the ports of phase ``name``; ``phases`` are all that the stage has."""
        phase = phases[name]
        self.stage, self.name, self.gives = stage.index, name, phase.gives
        tangents = stage.phases[name].named(TANGENT) if name == "I" else {}
        fakes = {Port(TANGENT, n): val(node) for n, node in tangents.items() if n != "loss"}
        # Gradients that the next stage may not compute: zeros stand in for them.
        self.gaps = tuple((port, fake.shape, fake.dtype) for port, fake in fakes.items())
        self._storage, self._constants = storage, constants
        self._seen = -1  # version of the storage that the fixed inputs were looked up in
        self._fixed: list[torch.Tensor] = []
        self.copied: tuple[int, ...] | None = None  # results to copy; unknown before the first call
        self._sort_inputs(phase, _drawers(phases))
        self._sort_outputs(phase, _drawers(phases))

    def args(self, run: Run, number: int) -> list[torch.Tensor]:
        """Return the inputs for one micro-batch; what is read for the last time has gone there."""
        if self._seen != self._storage.version:
            self._seen = self._storage.version
            self._fixed = [self._look_up(port) for port in self._fixed_ports]
        found = self._fixed.copy()
        found += [look(run, number) for look in self._lookups]
        held = run.held[self.stage, number]
        for port, is_last in self._arrivals:
            value = held.pop(port) if is_last else held[port]
            found.append(value if isinstance(value, torch.Tensor) else value.wait())
        if self._moving is not None:
            for bucket in self._sent:
                self._storage.arrive(bucket)
            found += self._moving(self._storage.live)
        for drawer, is_last in self._drawers:
            found += held.pop(drawer) if is_last else held[drawer]
        return found if self._arrange is None else list(self._arrange(found))

    def keep(self, held: Held, results: Sequence[torch.Tensor | None]) -> None:
        """Put away what later phases read."""
        for drawer, pick in self._kept:
            held[drawer] = pick(results)

    def _sort_inputs(self, phase: Phase, drawers: Mapping[Port, Drawer]) -> None:
        places = {port: place for place, port in enumerate(phase.inputs)}
        in_drawers: dict[Drawer, list[Port]] = {}
        fixed, looked_up, arriving, moving = [], [], [], []
        for port in phase.inputs:
            if port.kind == SAVED:
                in_drawers.setdefault(drawers[port], []).append(port)
            elif port.kind in (BOUNDARY, TANGENT):
                arriving.append(port)
            elif port.kind == PARAM and not self._storage.is_fixed(port.name):
                moving.append(port)
            elif (look := self._lookup(port)) is not None:
                looked_up.append((port, look))
            else:
                fixed.append(port)
        self._fixed_ports = tuple(fixed)
        self._lookups = tuple(look for _, look in looked_up)
        self._arrivals = tuple((port, port in phase.last) for port in arriving)
        self._moving = _picker([port.name for port in moving]) if moving else None
        layout = self._storage.layout
        buckets = dict.fromkeys(layout.slots[port.name].bucket for port in moving)
        self._sent = tuple(b for b in buckets if self._storage.is_sent(b) and self._is_whole(b))
        # A drawer is read whole, by each of its readers: in the order in which it was filled.
        whole = {d: [p for p in drawers if drawers[p] == d] for d in in_drawers}
        self._drawers = tuple((drawer, drawer[1][-1] == self.name) for drawer in whole)
        found = [*fixed, *(port for port, _ in looked_up), *arriving, *moving]
        found += [port for ports in whole.values() for port in ports]
        order = [found.index(port) for port in places]
        self._arrange = None if order == list(range(len(found))) else _picker(order)

    def _sort_outputs(self, phase: Phase, drawers: Mapping[Port, Drawer]) -> None:
        places = {port: place for place, port in enumerate(phase.outputs)}
        own = [port for port in drawers if drawers[port][0] == self.name]
        filled = dict.fromkeys(drawers[port] for port in own)
        self._kept = tuple(
            (drawer, _picker([places[port] for port in own if drawers[port] == drawer]))
            for drawer in filled
        )
        self.outputs = tuple(
            (place, port)
            for place, port in enumerate(phase.outputs)
            if port.kind != SAVED and place in phase.returned
        )

    def _is_whole(self, name: str) -> bool:
        """Tell whether a bucket is read as it is stored: no graph gathers or casts it."""
        bucket = self._storage.layout.buckets[name]
        return bucket.axis is None and bucket.read_dtype == bucket.dtype

    def _lookup(self, port: Port) -> Lookup | None:
        """Return how to find an input that is another one each time, None where it stays."""
        name, storage = port.name, self._storage
        if port.kind == BATCH:
            return lambda run, number: run.microbatches[number][name]
        if port.kind == NORMALIZER:
            return lambda run, number: run.normalizers[name]
        if port.kind == RNG:
            return lambda run, number: run.rng(number)
        if port.kind == FLAT and storage.is_sent(name):
            return lambda run, number: storage.flat(name)
        if port.kind in (PARAM, FLAT, BUFFER):
            return None
        raise InternalError(
            f"phase {self.name} of stage {self.stage} reads '{port}': no such input at run time"
        )

    def _look_up(self, port: Port) -> torch.Tensor:
        """Return an input that stays as long as the storage does."""
        if port.kind == PARAM:
            return self._storage.param(port.name)
        if port.kind == FLAT:
            return self._storage.flat(port.name)
        own = self._constants.get(port.name)
        return self._storage.buffer(port.name) if own is None else own


def _drawers(phases: Mapping[str, Phase]) -> dict[Port, Drawer]:
    """Return the drawer of each value that is kept for a later phase, in the order of results."""
    found: dict[Port, Drawer] = {}
    for place, name in enumerate(PER_MICROBATCH):
        later = [p for p in PER_MICROBATCH[place + 1 :] if p in phases]
        reads = {p: set(phases[p].inputs) for p in later}
        for port in phases[name].outputs if name in phases else ():
            readers = tuple(p for p in later if port in reads[p])
            if port.kind == SAVED and readers:
                found[port] = (name, readers)
    return found


def _picker(keys: Iterable[Any]) -> Pick:
    """Return what takes the items at ``keys`` out of a sequence or mapping, as a tuple."""
    wanted = tuple(keys)
    if len(wanted) == 1:
        (only,) = wanted
        return lambda items: (items[only],)
    return itemgetter(*wanted)
