"""Runs a program's phases for all ranks in one thread, to compare with autograd.

Each rank is a generator that yields at every collective or transfer; the driver resumes a rank when
its partners have come to the same point. Nothing is shared with the run-time: a mistake there does
not hide one here.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import torch

from autoshard.ir.graph_function import (
    BATCH,
    BOUNDARY,
    BUFFER,
    FLAT,
    FLAT_GRAD,
    GRAD,
    LOSS,
    PARAM,
    SAVED,
    TANGENT,
    GraphFunction,
    Port,
)
from autoshard.ir.params import Flat
from autoshard.ir.placement import shard_tensor
from autoshard.ir.program import Bucket, Program, Stage
from autoshard.ops import collectives as ops
from autoshard.ops.library import spec

Steps = Generator[object, object, object]
ACCUMULATED, FULL_GRAD, FULL = "accumulated", "full_grad", "full"


@dataclass(frozen=True)
class Collective:
    """A rank stands at a collective."""

    kind: str
    axis: str
    value: torch.Tensor
    members: tuple[int, ...] | None = None


@dataclass
class Step:
    """What one training step gave."""

    loss: torch.Tensor  # summed over microbatches and data-parallel ranks
    grads: dict[str, torch.Tensor]  # global gradients, reduced
    copies: dict[str, list[torch.Tensor]] = field(default_factory=dict)  # per home stage


class Rank:
    """One rank: its parameters, its buckets, and its step as a generator."""

    def __init__(self, program: Program, rank: int, state: dict[str, torch.Tensor], world) -> None:
        self.program, self.world = program, world
        self.coordinate = program.mesh.coordinate(rank)
        self.rank, self.index = rank, self.coordinate.get("pp", 0)
        self.local = {
            name: shard_tensor(t, program.params[name].placements, program.mesh, self.coordinate)
            for name, t in state.items()
            if name in program.params
        }
        self.loss = 0
        self.grads: dict[Port, torch.Tensor] = {}
        self.saved: dict[tuple[int, Port], torch.Tensor] = {}

    @property
    def stage(self) -> Stage:
        return self.program.stages[self.index]

    def buckets(self) -> Iterator[Bucket]:
        """Yield the buckets this rank stores."""
        for bucket in self.program.buckets:
            if self.index in (bucket.tied_stages or (bucket.stage,)):
                yield bucket

    def full(self, bucket: Bucket) -> torch.Tensor:
        """Return the whole flat buffer of a bucket, as if gathered."""
        first = self.local[bucket.fqns[0]]
        flat = torch.zeros(bucket.length, dtype=first.dtype)
        for name in bucket.fqns:
            storage, value = self.program.params[name].storage, self.local[name]
            flat[storage.offset : storage.offset + value.numel()] = value.reshape(-1)
        return flat

    def shard(self, bucket: Bucket) -> torch.Tensor:
        """Return this rank's part of a flat buffer."""
        size = self.program.mesh.size(bucket.axis)
        return self.full(bucket).view(size, -1)[self.place(bucket.axis)]

    def place(self, axis: str) -> int:
        return self.program.mesh.index(self.rank, axis)

    def step(self, batches: list[dict[str, torch.Tensor]], extra: dict[Port, object]) -> Steps:
        """Run forwards of all microbatches, then backwards in order."""
        self.extra = extra
        self.params = {Port(PARAM, n): t for n, t in self.local.items()}
        self.params |= {Port(BUFFER, n): t for n, t in self.local.items()}
        for bucket in self.buckets():
            if bucket.axis:
                self.params[Port(FLAT, bucket.name)] = self.shard(bucket)
        if "U" in self.stage.phases:
            yield from self.unshard()
        self.batches = batches
        for number in range(len(batches)):
            yield from self.forward(number)
        for number in range(len(batches)):
            yield from self.backward(number)
        yield from self.reduce()

    def unshard(self) -> Steps:
        results = yield from self.run(self.stage.phases["U"], self.params)
        for port, flat in results.items():
            for bucket in (b for b in self.buckets() if b.name == port.name):
                for name in bucket.fqns:
                    entry = self.program.params[name]
                    shape, start = self.local[name].shape, entry.storage.offset
                    part = flat[start : start + shape.numel()].view(shape)
                    self.params[Port(PARAM, name)] = part

    def common(self, number: int) -> dict[Port, torch.Tensor]:
        batch = {Port(BATCH, name): t for name, t in self.batches[number].items()}
        extra = {port: value(self, number) for port, value in self.extra.items()}
        return {**self.params, **batch, **extra}

    def forward(self, number: int) -> Steps:
        given = self.common(number)
        for port in self.stage.phases["F"].inputs:
            if port.kind == BOUNDARY:
                given[port] = yield ("recv", self.peer(-1), (port, number))
        results = yield from self.run(self.stage.phases["F"], given)
        for port, value in results.items():
            if port.kind == BOUNDARY:
                yield ("send", self.peer(1), (port, number), value)
            elif port.kind == LOSS:
                self.loss = self.loss + value
            elif port.kind == SAVED:
                self.saved[number, port] = value

    def backward(self, number: int) -> Steps:
        given = self.common(number)
        ports = dict.fromkeys((*self.stage.phases["I"].inputs, *self.stage.phases["W"].inputs))
        for port in ports:
            if port == Port(TANGENT, "loss"):
                given[port] = torch.ones((), dtype=self.loss.dtype)
            elif port.kind == TANGENT:
                given[port] = yield ("recv", self.peer(1), (port, number))
            elif port.kind == SAVED and (number, port) in self.saved:
                given[port] = self.saved.pop((number, port))
        for phase in ("I", "W"):
            results = yield from self.run(self.stage.phases[phase], given)
            for port, value in results.items():
                if port.kind == TANGENT:
                    yield ("send", self.peer(-1), (port, number), value)
                elif port.kind == SAVED:
                    given[port] = value
                else:
                    assert port.kind in (GRAD, FLAT_GRAD)
                    self.grads[port] = self.grads[port] + value if port in self.grads else value

    def reduce(self) -> Steps:
        if "R" not in self.stage.phases:
            return
        given = dict(self.params)
        for bucket in self.buckets():
            port = Port(FLAT_GRAD, bucket.name)
            if port in self.stage.phases["R"].inputs:
                given[port] = self.grads.get(port, torch.zeros_like(self.shard(bucket)))
                continue
            flat = torch.zeros_like(self.full(bucket))
            for name in bucket.fqns:
                grad = self.grads.get(Port(GRAD, name))
                start = self.program.params[name].storage.offset
                if grad is not None:
                    flat[start : start + grad.numel()] = grad.reshape(-1)
            given[Port(ACCUMULATED, bucket.name)] = flat
        self.grads |= yield from self.run(self.stage.phases["R"], given)

    def peer(self, move: int) -> int:
        return self.program.mesh.rank(**{**self.coordinate, "pp": self.index + move})

    def run(self, function: GraphFunction, given: dict[Port, torch.Tensor]) -> Steps:
        """Run one graph; inputs must have the shape and dtype the graph was made for."""
        env: dict[torch.fx.Node, object] = {}
        for port, node in zip(function.inputs, function.placeholders, strict=True):
            value, fake = given[port], node.meta["val"]
            assert (value.shape, value.dtype) == (fake.shape, fake.dtype), (port, value.shape, fake)
            env[node] = value
        for node in function.graph.nodes:
            if node.op == "call_function":
                look = env.__getitem__
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), look)
                env[node] = yield from self.call(node.target, args, kwargs)
        return {
            port: env[node]
            for port, node in zip(function.outputs, function.results, strict=True)
            if node is not None
        }

    def call(self, op: object, args: tuple, kwargs: dict) -> Steps:
        operator = spec(op)
        if operator is None:
            return op(*args, **kwargs)
        name = operator.name.removesuffix("_start")
        if name == "wait":
            return args[0]
        if name == "all_reduce":
            return (yield Collective("sum", args[1], args[0]))
        if name == "tied_all_reduce":
            return (yield Collective("sum", args[1], args[0], tuple(args[2])))
        if name == "all_gather":
            x, dim, blocks, axis = args[:4]
            parts = yield Collective("stack", axis, x)
            return ops.unpack_blocks(parts, dim, blocks)
        if name == "reduce_scatter":
            x, dim, blocks, axis, size = args
            return (yield Collective("sum", axis, ops.pack_blocks(x, dim, blocks, size)))[
                self.place(axis)
            ]
        if name == "shard":
            x, dim, blocks, axis, size = args
            return ops.pack_blocks(x, dim, blocks, size)[self.place(axis)]
        return operator.run(None, *args)


def run_step(
    program: Program,
    state: dict[str, torch.Tensor],
    batches: dict[int, list[dict[str, torch.Tensor]]],
    extra: dict[Port, object] | None = None,
) -> Step:
    """Run one step on all ranks; ``batches[dp index]`` are that rank's microbatches."""
    ranks = [Rank(program, r, state, None) for r in range(program.mesh.world_size)]
    _drive(ranks, [r.step(batches[program.mesh.index(r.rank, "dp")], extra or {}) for r in ranks])
    last = len(program.stages) - 1
    loss = sum(r.loss for r in ranks if r.index == last and r.coordinate.get("tp", 0) == 0)
    return _collect(program, ranks, loss)


def _drive(ranks: list[Rank], steps: list[Steps]) -> None:
    """Resume ranks until all are done; a round in which none moves is a deadlock."""
    at: dict[int, object] = {}
    mail: dict[tuple[int, object], torch.Tensor] = {}
    for index, step in enumerate(steps):
        _advance(at, index, step, None)
    while at:
        moved = False
        for index in list(at):
            done, answer = _answer(ranks, at, mail, index) if index in at else (False, None)
            if not done:
                continue
            moved = True
            for member, value in answer.items():
                _advance(at, member, steps[member], value)
        assert moved, f"all ranks wait: { {i: str(a)[:80] for i, a in at.items()} }"


def _advance(at: dict[int, object], index: int, step: Steps, value: object) -> None:
    at.pop(index, None)
    try:
        at[index] = step.send(value)
    except StopIteration:
        return


def _answer(ranks: list, at: dict, mail: dict, index: int) -> tuple[bool, dict[int, object]]:
    asked = at[index]
    if isinstance(asked, tuple):
        key = asked[2]
        if asked[0] == "send":
            mail[asked[1], key] = asked[3].contiguous()
            return True, {index: None}
        return ((index, key) in mail), {index: mail.pop((index, key), None)}
    group = ranks[index].program.mesh.group(index, asked.axis)
    if asked.members is not None:
        group = tuple(group[m] for m in asked.members)
    stand = [at.get(member) for member in group]
    if not all(isinstance(s, Collective) and s.axis == asked.axis for s in stand):
        return False, {}
    assert len({(s.kind, s.value.shape, s.value.dtype, s.members) for s in stand}) == 1, stand
    values = torch.stack([s.value for s in stand])
    result = values if asked.kind == "stack" else values.sum(0)
    return True, dict.fromkeys(group, result)


def _collect(program: Program, ranks: list[Rank], loss: torch.Tensor) -> Step:
    """Return the global gradients, each home's copy separately, from reduced ones or the sum."""
    found = Step(loss, {})
    for entry in program.params:
        copies = [
            g for home in entry.homes if (g := _gradient(program, ranks, entry, home)) is not None
        ]
        if copies:
            found.copies[entry.fqn] = copies
            reduced = bool(program.buckets)
            found.grads[entry.fqn] = copies[0] if reduced else sum(copies)
    return found


def _gradient(program: Program, ranks: list[Rank], entry, home: int) -> torch.Tensor | None:
    mine = [r for r in ranks if r.index == home and r.coordinate.get("tp", 0) == 0]
    bucket = next((b for b in program.buckets if entry.fqn in b.fqns), None)
    if bucket is None or (port := Port(FULL_GRAD, bucket.name)) not in mine[0].grads:
        one = [r for r in mine if not (bucket and r.coordinate.get("dp_replicate", 0))]
        shards = [r.grads.get(Port(FLAT_GRAD, bucket.name)) for r in one] if bucket else [None]
        if shards[0] is None:
            grads = [r.grads.get(Port(GRAD, entry.fqn)) for r in mine]
            return None if grads[0] is None else sum(grads)
        flat = torch.cat(shards)
    else:
        flat = mine[0].grads[port]
    shape = mine[0].local[entry.fqn].shape
    assert isinstance(entry.storage, Flat) or bucket.axis is None
    return flat[entry.storage.offset :][: shape.numel()].view(shape)
