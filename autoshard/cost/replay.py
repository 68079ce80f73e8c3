"""Predict a rank's peak of memory: its actions replayed on sizes alone, as `runtime.run` does them.

Gradients are attached to nothing when the step begins, and the optimizer has its state already.
What is offloaded lies in host memory, unless the device's memory is the host's.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from functools import cache
from math import prod

from autoshard.cost.footprint import Footprint, Step, footprint
from autoshard.cost.memory import MOMENTS, owned_elements
from autoshard.cost.peak import (
    ACTIVATIONS,
    COMMUNICATION,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Peak,
)
from autoshard.ir.buckets import is_kept
from autoshard.ir.graph_function import (
    ACCUMULATED,
    BOUNDARY,
    FLAT_GRAD,
    FULL,
    PARAM,
    SAVED,
    TANGENT,
    GraphFunction,
    Port,
)
from autoshard.ir.messages import CARRIES, boundaries, inbox, left_of
from autoshard.ir.program import PER_MICROBATCH, Bucket, Program
from autoshard.ops.communicator import IN_FLIGHT
from autoshard.schedule import Action, Kind
from autoshard.schedule.action import RECVS, SENDS
from autoshard.schedule.posting import posted

Key = Hashable
Profile = Callable[[int, str], Footprint]  # of a stage's phase


def peaks(program: Program, optimizer: str = "adamw", *, has_host: bool = True) -> tuple[Peak, ...]:
    """Return the peak of one rank of every pipeline coordinate; the program has a schedule.

    Without ``has_host`` the device is a CPU, whose memory is the host's: nothing is offloaded.
    """
    assert program.schedule is not None, "a program at level SCHEDULE"
    ranks = range(program.schedule.num_ranks)
    return tuple(peak_of(program, rank, optimizer, has_host=has_host) for rank in ranks)


def peak_of(
    program: Program,
    rank: int,
    optimizer: str = "adamw",
    *,
    has_host: bool = True,
    profile: Profile | None = None,
) -> Peak:
    """Return the peak of a rank at pipeline coordinate ``rank``.

    ``profile`` gives other footprints than the graphs': what if they made and freed that?
    """
    return _Replay(program, rank, optimizer, has_host, profile).peak()


class _Heap:
    """Live storages with their bytes, categories and the number of those who hold them."""

    def __init__(self) -> None:
        self._held: dict[Key, list] = {}  # [bytes, category, holders]
        self._sizes: Counter[str] = Counter()
        self._total = 0
        self._numbers = itertools.count()
        self.peak, self.gathered = Peak({}), 0
        self.action = ""

    def make(self, nbytes: int, category: str, node: str = "", needs: int = 0) -> Key:
        """Allocate; ``needs`` are bytes of communication for the moment only."""
        key = next(self._numbers)
        self._held[key] = [nbytes, category, 1]
        self._add(category, nbytes)
        self._total += nbytes
        self.reach(node, needs)
        return key

    def reach(self, node: str, needs: int = 0) -> None:
        """Note a moment."""
        if self._total + needs > self.peak.total:
            sizes = {**self._sizes, COMMUNICATION: self._sizes[COMMUNICATION] + needs}
            self.peak = Peak(sizes, self.action, node)

    def keep(self, key: Key) -> None:
        """Let one more hold it."""
        self._held[key][2] += 1

    def drop(self, key: Key) -> None:
        """Let one less hold it; with the last one it goes."""
        held = self._held[key]
        held[2] -= 1
        if held[2] == 0:
            self._sizes[held[1]] -= held[0]
            self._total -= held[0]
            del self._held[key]

    def size(self, key: Key) -> int:
        """Return its bytes."""
        return self._held[key][0]

    def call(self, key: Key, category: str) -> None:
        """Count it as something else."""
        held = self._held[key]
        self._sizes[held[1]] -= held[0]
        self._add(category, held[0])
        held[1] = category

    def _add(self, category: str, nbytes: int) -> None:
        self._sizes[category] += nbytes
        self.gathered = max(self.gathered, self._sizes[GATHERED])


class _Replay:
    """One rank's step."""

    def __init__(
        self, program: Program, rank: int, optimizer: str, has_host: bool, profile: Profile | None
    ) -> None:
        assert program.schedule is not None
        self._program, self._row = program, program.schedule.ranks[rank]
        self._profile = cache(profile or self._footprint)
        self._stages = program.schedule.stages_of(rank)
        own = set(self._stages)
        self._buckets = {b.name: b for b in program.buckets if own & set(_homes(b))}
        self._bucket_of = {fqn: b for b in self._buckets.values() for fqn in b.fqns}
        self._away = [b for b in self._buckets.values() if b.on_host and has_host]
        self._fetched = frozenset(bucket.name for bucket in self._away if bucket.is_fetched)
        self._host = 0  # bytes that offloading holds in host memory
        self._heap = _Heap()
        self._inbox = inbox(program, self._row)
        self._buffers: list[Key] = []
        self._boundaries = boundaries(program)
        self._values: dict[tuple[int, int], dict[Port, Key]] = {}
        self._outgoing: dict[tuple[str, int, int], list[Key]] = {}
        self._sending: dict[tuple[Kind, int], deque[list[Key]]] = {}
        self._sums: dict[tuple[int, str], Key] = {}
        self._shards: dict[tuple[int, str], Key] = {}
        self._gathered: dict[str, Key] = {}
        self._resharded: set[int] = set()
        self._store(optimizer)

    def peak(self) -> Peak:
        """Run all actions and return the moment with the most bytes."""
        scheduled = {a.stage for a in self._row if a.kind is Kind.UNSHARD}
        for stage in self._stages:
            if stage not in scheduled:
                self._unshard(stage)
        for action in (action for step in posted(self._row) for action in step):
            self._heap.action = str(action)
            self._carry_out(action)
        return replace(self._heap.peak, host=self._host, gathered=self._heap.gathered)

    def _store(self, optimizer: str) -> None:
        """Allocate what is there between steps."""
        program, own = self._program, set(self._stages)
        away = {fqn for bucket in self._away for fqn in bucket.fqns}
        for bucket in self._buckets.values():
            self._store_bucket(bucket)
        for value in self._inbox.buffers:
            self._buffers.append(self._heap.make(value.nbytes, COMMUNICATION))
        for spec in program.params:
            if spec.is_buffer and own & set(spec.homes):
                elements = prod(spec.local_shape(program.mesh))
                self._heap.make(elements * spec.dtype.itemsize, PARAMETERS)
            elif spec.requires_grad and own & set(spec.homes):
                owned = owned_elements(program, spec) * spec.dtype.itemsize
                if spec.fqn in away:
                    self._host += owned * (MOMENTS[optimizer] + 1)  # its gradient comes there too
                else:
                    self._heap.make(owned * MOMENTS[optimizer], OPTIMIZER)

    def _store_bucket(self, bucket: Bucket) -> None:
        """Allocate a bucket where it is stored, and the copy that phases read."""
        is_read = bucket.read_dtype == bucket.dtype
        length = bucket.length // self._parts(bucket)
        stored, read = length * bucket.dtype.itemsize, length * bucket.read_dtype.itemsize
        is_cast = bucket.on_host and not is_read  # the host casts what it sends
        if bucket not in self._away:
            self._heap.make(stored, PARAMETERS if is_read else OPTIMIZER)
            if is_cast:
                self._heap.make(read, PARAMETERS)
            return
        self._host += stored + (read if is_cast else 0)
        if not bucket.is_fetched:
            self._heap.make(read, PARAMETERS)

    def _carry_out(self, action: Action) -> None:
        kind, stage = action.kind, action.stage
        if kind in SENDS:
            self._send(action)
        elif kind in RECVS:
            self._receive(action)
        elif kind is Kind.UNSHARD:
            self._unshard(stage)
        elif kind is Kind.RESHARD:
            self._reshard(stage)
        elif kind is Kind.REDUCE_GRAD:
            self._reduce(stage)
        else:
            for phase in ("I", "W") if kind is Kind.B else (kind.value,):
                self._compute(phase, stage, action.microbatch or 0)

    # phases -------------------------------------------------------------------------------------
    def _compute(self, phase: str, stage: int, number: int) -> None:
        if phase not in self._program.stages[stage].phases:
            return
        held = self._values.setdefault((stage, number), {})
        if phase == "I":
            self._fill_tangents(stage, held)
        last = self._last_reads(stage, phase)
        bound = {}
        for port, storage, _ in self._profile(stage, phase).inputs:
            if port in held:
                bound[storage] = held.pop(port) if port in last else held[port]
                if port not in last:
                    self._heap.keep(bound[storage])
        for port, key in self._run(stage, phase, bound):
            self._output(port, self._apart(key), stage, number)

    def _apart(self, key: Key) -> Key:
        """Copy what lies in a buffer: the next message overwrites it."""
        if key not in self._buffers:
            return key
        self._heap.drop(key)
        return self._heap.make(self._heap.size(key), ACTIVATIONS, "clone")

    def _run(self, stage: int, phase: str, bound: dict) -> list[tuple[Port, Key]]:
        """Run a graph's steps; return what comes out, which the caller holds now."""
        profile = self._profile(stage, phase)
        for step in profile.steps:
            for storage, nbytes, category in step.makes:
                bound[storage] = self._heap.make(nbytes, category, step.name, step.needs)
            self._give(stage, step)
            for storage in step.frees:
                if storage in bound:
                    self._heap.drop(bound.pop(storage))
        results = []
        for port, storage in profile.outputs:
            if storage in bound:
                self._heap.keep(bound[storage])
                results.append((port, bound[storage]))
        for key in bound.values():
            self._heap.drop(key)
        return results

    def _give(self, stage: int, step: Step) -> None:
        for port in step.gives:
            bucket = self._bucket_of[port.name]
            if (stage, bucket.name) not in self._sums:
                nbytes = bucket.length * bucket.grad_dtype.itemsize
                self._sums[stage, bucket.name] = self._heap.make(nbytes, GRADIENTS, step.name)

    def _output(self, port: Port, key: Key, stage: int, number: int) -> None:
        if port.kind == FLAT_GRAD and (stage, port.name) not in self._shards:
            self._shards[stage, port.name] = key
            self._heap.call(key, GRADIENTS)
        elif port.kind == SAVED:
            self._values[stage, number][port] = key
            self._heap.call(key, GATHERED if is_kept(port) else ACTIVATIONS)
        elif port.kind in (BOUNDARY, TANGENT):
            self._heap.call(key, ACTIVATIONS)
            self._pass_on(port, key, stage, number)
        else:
            self._heap.drop(key)

    def _pass_on(self, port: Port, key: Key, stage: int, number: int) -> None:
        neighbour = stage + (1 if port.kind == BOUNDARY else -1)
        if neighbour not in self._stages:
            self._outgoing.setdefault((port.kind, stage, number), []).append(key)
        elif any(port in f.inputs for f in self._phases(neighbour)):
            self._values.setdefault((neighbour, number), {})[port] = key
        else:
            self._heap.drop(key)

    def _fill_tangents(self, stage: int, held: dict[Port, Key]) -> None:
        for port, _, nbytes in self._profile(stage, "I").inputs:
            if port.kind == TANGENT and port.name != "loss" and port not in held:
                held[port] = self._heap.make(nbytes, GRADIENTS, "zeros")

    def _last_reads(self, stage: int, phase: str) -> set[Port]:
        phases = self._program.stages[stage].phases
        later = PER_MICROBATCH[PER_MICROBATCH.index(phase) + 1 :]
        read = {p: {port for port, _, _ in self._profile(stage, p).inputs} for p in phases}
        return read[phase].difference(*(read[p] for p in later if p in phases))

    # messages -----------------------------------------------------------------------------------
    def _send(self, action: Action) -> None:
        sent = self._sending.setdefault((action.kind, action.stage), deque())
        while len(sent) > IN_FLIGHT:
            self._drop_all(sent.popleft())
        place = (CARRIES[action.kind], action.stage, action.microbatch or 0)
        keys = self._outgoing.pop(place, [])
        for key in keys:
            self._heap.call(key, COMMUNICATION)
        sent.append(keys)

    def _receive(self, action: Action) -> None:
        held = self._values.setdefault((action.stage, action.microbatch or 0), {})
        values = self._boundaries[left_of(action)].carried(action)
        for value, place in zip(values, self._inbox.places[action], strict=True):
            key = held[Port(CARRIES[action.kind], value.name)] = self._buffers[place]
            self._heap.keep(key)

    # storage ------------------------------------------------------------------------------------
    def _unshard(self, stage: int) -> None:
        if "U" in self._program.stages[stage].phases:
            for port, key in self._run(stage, "U", {}):
                assert port.kind == FULL, port
                is_cut = self._buckets[port.name].axis is not None
                self._heap.call(key, GATHERED if is_cut else PARAMETERS)
                self._gathered[port.name] = key

    def _reshard(self, stage: int) -> None:
        self._resharded.add(stage)
        for name in list(self._gathered):
            readers = {s for s in self._stages if self._reads(s, self._buckets[name])}
            if self._buckets[name].axis and stage in readers <= self._resharded:
                self._heap.drop(self._gathered.pop(name))

    def _reads(self, stage: int, bucket: Bucket) -> bool:
        inputs = {port for f in self._phases(stage) for port in f.inputs}
        return any(Port(PARAM, fqn) in inputs for fqn in bucket.fqns)

    def _reduce(self, stage: int) -> None:
        if "R" not in self._program.stages[stage].phases:
            return
        bound = {}
        for port, storage, nbytes in self._profile(stage, "R").inputs:
            sums = self._sums if port.kind == ACCUMULATED else self._shards
            keys = [sums.pop(place) for place in sorted(p for p in sums if p[1] == port.name)]
            bound[storage] = keys[0] if keys else self._heap.make(nbytes, GRADIENTS, "zeros")
            self._drop_all(keys[1:])
        for port, key in self._run(stage, "R", bound):
            self._shards[stage, f"reduced {port.name}"] = key
            self._heap.call(key, GRADIENTS)

    # small --------------------------------------------------------------------------------------
    def _phases(self, stage: int) -> list[GraphFunction]:
        phases = self._program.stages[stage].phases
        return [phases[name] for name in PER_MICROBATCH if name in phases]

    def _footprint(self, stage: int, phase: str) -> Footprint:
        function = self._program.stages[stage].phases[phase]
        return footprint(function, self._program.mesh, self._fetched)

    def _parts(self, bucket: Bucket) -> int:
        return self._program.mesh.size(bucket.axis) if bucket.axis else 1

    def _drop_all(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._heap.drop(key)


def _homes(bucket: Bucket) -> tuple[int, ...]:
    return bucket.tied_stages or (bucket.stage,)
