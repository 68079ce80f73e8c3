"""Erase what makes a program parallel and compare what is left with the plain model's joint graph.

The stages' phases are read one after another as one function: what one saves or sends, the next
one reads. Collectives, casts, gathers and padding vanish, local shapes are read as global ones by
the placements that the check of types has proved. What is left must be the same terms that the
plain model's forward and backward give: its loss, and the gradient of every parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch.fx import Node

from autoshard.ir.graph_function import (
    ACCUMULATED,
    BOUNDARY,
    BUFFER,
    FLAT,
    FLAT_GRAD,
    FULL,
    GRAD,
    LOSS,
    OUTPUT,
    PARAM,
    SAVED,
    TANGENT,
    GraphFunction,
    Port,
)
from autoshard.ir.node_info import origin
from autoshard.ir.padding import Padding
from autoshard.ir.params import Flat, ParamSpec, Whole
from autoshard.ir.placement import Shard
from autoshard.ir.program import Bucket, Program, Stage
from autoshard.ir.rules.call import Shape, shapes_of
from autoshard.ops import collectives
from autoshard.proof.normal_form import READINGS
from autoshard.proof.paddings import Held, Paddings, padding_of
from autoshard.proof.plain import PlainGraph, PlainSide, counts, seed
from autoshard.proof.reader import Maker, Reader, Value
from autoshard.proof.terms import Terms
from autoshard.proof.types import Placed

TIED = "tied"
PACK = "pack"
ZEROS = "zeros"
WHOLE_LOSSES = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)


@dataclass
class ErasureFindings:
    """What differs, what could not be read, and which named rewrites the comparison rests on."""

    wrong: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    rewrites: tuple[str, ...] = ()
    equal: int = 0  # outputs and gradients that are the same term on both sides


def check_erasure(
    program: Program, plain: PlainGraph | PlainSide, placed: Placed
) -> ErasureFindings:
    """Compare a program below level JOINT with the plain forward graph it was made from.

    ``placed`` are the placements along tp that ``check_types`` found. A plain side that was read
    before may be given in place of its graph.
    """
    side = plain if isinstance(plain, PlainSide) else PlainSide.read(plain, program)
    right = _Joined(program, placed, side.reader.terms)
    right.read()
    return _Comparison(program, side, right).findings()


class _Joined:
    """The terms of a compiled program: all stages and phases read as one function."""

    def __init__(self, program: Program, placed: Placed, terms: Terms) -> None:
        self.program, self.placed, self.terms = program, placed, terms
        special = {
            collectives.view_at: self._view_at,
            collectives.pack: self._pack,
            collectives.tied_all_reduce: self._tied,
            torch.ops.aten.constant_pad_nd.default: self._padding,
        }
        self.reader = Reader(terms, self._shapes, {**READINGS, **special}, self._factor)
        self.stage = program.stages[0]
        self.values: dict[Port, int] = {}  # boundaries, tangents: by their own names
        self.saved: dict[Port, int] = {}
        self.made: dict[tuple[int, str], int] = {}  # stage, fqn -> gradient of a microbatch
        self.flat: dict[tuple[int, str], int] = {}  # stage, bucket -> gradient of a microbatch
        self.final: dict[tuple[int, str], int] = {}  # rank along pp, bucket -> gradient after R
        self.problems: list[str] = []
        self.unknown: set[Node] = set()  # whose placement is not known
        self.paddings = Paddings(program, placed)
        self.carried: dict[Port, Held] = {}  # padding of what phases and stages hand on
        self.real = _padded(program)  # padded extent -> the model's own

    def read(self) -> None:
        """Read F of all stages, then I and W from the last stage to the first, then R and U."""
        self.values[Port(TANGENT, "loss")] = seed(self.terms)
        kept: dict[int, dict[Port, int]] = {}
        for stage in self.program.stages:
            self.saved = kept[stage.index] = {}
            self._phase(stage, "F")
        for stage in reversed(self.program.stages):
            self.saved = kept[stage.index]
            for phase in ("I", "W"):
                self._phase(stage, phase)
        for stage in self.program.stages:
            for phase in ("R", "U"):
                self._phase(stage, phase)

    def _phase(self, stage: Stage, phase: str) -> None:
        function = stage.phases.get(phase)
        if function is None:
            return
        self.stage = stage
        self.reader.place = f"stage {stage.index}, {phase}"
        for port, node in zip(function.inputs, function.placeholders, strict=True):
            self.reader.env[node] = self._input(port)
        if self.paddings.is_needed and phase in ("F", "I", "W"):
            self._read_padded(function)
        self.reader.run(function.graph.nodes)
        for port, node in zip(function.outputs, function.results, strict=True):
            if node is not None and phase == "R":
                self.final[self._rank(stage.index), port.name] = self.reader.env[node]
            elif node is not None:
                self._output(port, node)

    def _read_padded(self, function: GraphFunction) -> None:
        """Read each call after what is known of its padding: shapes are those without."""
        for port, node in zip(function.inputs, function.placeholders, strict=True):
            spec = self.program.params[port.name] if port.kind in (PARAM, BUFFER) else None
            self.paddings.env[node] = padding_of(spec) if spec else self.carried.get(port)
        for node in function.graph.nodes:
            if node.op == "call_function":
                is_view = node.target is collectives.view_at
                self.paddings.read(node, self._viewed(self.reader, node) if is_view else None)
                self.reader.run((node,))
        for port, node in zip(function.outputs, function.results, strict=True):
            if node is not None and port.kind in (SAVED, BOUNDARY, TANGENT):
                self.carried[port] = self.paddings.env.get(node)
        self.paddings.check_gradients(function)

    def _input(self, port: Port) -> int:
        if port.kind == SAVED:
            return self.saved[port]
        if port.kind in (BOUNDARY, TANGENT):
            return self.values[port]
        if port.kind in (ACCUMULATED, FLAT_GRAD):
            return self._packed(self.stage.index, self._bucket(port.name))
        return self.terms.make(port.kind, (), port.name)

    def _output(self, port: Port, node: Node) -> None:
        value = self.reader.env[node]
        if port.kind == SAVED:
            self.saved[port] = value
        elif port.kind in (BOUNDARY, TANGENT, LOSS, OUTPUT):
            self.values[port] = value
        elif port.kind == GRAD:
            self.made[self.stage.index, port.name] = value
        elif port.kind == FLAT_GRAD:
            self.flat[self.stage.index, port.name] = value
        elif port.kind == FULL and value != self.terms.make(FLAT, (), port.name):
            self.problems.append(f"U gives out another value than bucket '{port.name}'")

    def _bucket(self, name: str) -> Bucket:
        return next(bucket for bucket in self.program.buckets if bucket.name == name)

    def _rank(self, stage: int) -> int:
        schedule = self.program.schedule
        return stage if schedule is None else schedule.stage_to_rank[stage]

    def _packed(self, stage: int, bucket: Bucket) -> int:
        """Return a bucket's gradient as the phases on the stage's rank made it, summed.

        A parameter may be tied over several stages of a rank. Zeros where there is no gradient.
        """
        homes = [s for s in bucket.tied_stages if self._rank(s) == self._rank(stage)] or [stage]
        made = [self._made_by(home, bucket) for home in homes]
        packs = [self.terms.made[number] for number in made]
        if len(made) == 1 or any(
            p.op != PACK or len(p.children) != len(bucket.fqns) for p in packs
        ):
            return made[0]
        columns = zip(*(pack.children for pack in packs), strict=True)
        zeros = self.terms.make(ZEROS)
        sums = (zeros if (total := self._sum(c)) is None else total for c in columns)
        return self.terms.make(PACK, sums)

    def _made_by(self, stage: int, bucket: Bucket) -> int:
        """Return what one stage made of a bucket's gradient, reduced already or not."""
        zeros = self.terms.make(ZEROS)
        parts = (self.made.get((stage, fqn), zeros) for fqn in bucket.fqns)
        reduced = self.flat.get((stage, bucket.name))
        return self.terms.make(PACK, parts) if reduced is None else reduced

    def gradient(self, stage: int, bucket: Bucket) -> int:
        """Return the final gradient of a bucket on the rank of a stage that stores it."""
        found = self.final.get((self._rank(stage), bucket.name))
        return self._packed(stage, bucket) if found is None else found

    def parts(self, stage: int, bucket: Bucket) -> dict[str, int | None]:
        """Return parameter -> its final gradient, None where that is zero."""
        final = self.terms.made[self.gradient(stage, bucket)]
        packs = [final]
        if final.op == TIED:
            packs = [self._tied_part(other, bucket) for other in final.attrs[0]]
        if any(pack.op != PACK or len(pack.children) != len(bucket.fqns) for pack in packs):
            return {}
        columns = zip(*(pack.children for pack in packs), strict=True)
        return {fqn: self._sum(shares) for fqn, shares in zip(bucket.fqns, columns, strict=True)}

    def _tied_part(self, stage: int, bucket: Bucket) -> object:
        other = self.terms.made[self.gradient(stage, bucket)]
        return self.terms.made[other.children[0]] if other.op == TIED else other

    def _sum(self, shares: tuple[int, ...]) -> int | None:
        zeros = (ZEROS, "aten.new_zeros.default")
        held = [share for share in shares if self.terms.made[share].op not in zeros]
        return self.terms.add(*held) if held else None

    def _view_at(self, reader: Reader, node: Node) -> Value:
        """A view of a gathered bucket is the parameter that is stored there, and no other."""
        spec = self._viewed(reader, node)
        return None if spec is None else self.terms.make("param", (), spec.fqn)

    def _viewed(self, reader: Reader, node: Node) -> ParamSpec | None:
        flat = self.terms.made[reader.env[node.args[0]]]
        if flat.op != FLAT:
            return None
        for fqn in self._bucket(flat.attrs[0]).fqns:
            spec = self.program.params[fqn]
            is_here = (
                isinstance(spec.storage, (Flat, Whole)) and spec.storage.offset == node.args[1]
            )
            if is_here and spec.local_shape(self.program.mesh) == tuple(node.args[2]):
                return spec
        return None

    def _padding(self, reader: Reader, node: Node) -> Value:
        """What gives a value zeros for padded heads, and its transpose, are left out."""
        return reader.env[node.args[0]] if self.paddings.cuts(node) else None

    def _pack(self, reader: Reader, node: Node) -> Value:
        return self.terms.make(PACK, (reader.env[n] for n in node.args[0]))

    def _tied(self, reader: Reader, node: Node) -> Value:
        """The sum over the stages that tie a bucket is taken once all of them are read."""
        first = {self._rank(s.index): s.index for s in reversed(self.program.stages)}
        stages = tuple(first[rank] for rank in node.args[2] if rank in first)
        return self.terms.make(TIED, (reader.env[node.args[0]],), stages)

    def _shapes(self, node: Node) -> tuple[Shape | None, ...]:
        local = shapes_of(node)
        if self.program.mesh.size("tp") == 1:
            return local
        held = self.placed.get(node)
        placements = held if isinstance(held, tuple) else (held,) * len(local)
        if any(p is None for p in placements):
            self.unknown.add(node)
        paddings = self.paddings.env.get(node)
        padded = paddings if isinstance(paddings, tuple) else (paddings,) * len(local)
        return tuple(map(self._global, local, placements, padded))

    def _global(
        self, shape: Shape, placement: object, padding: Padding | None = None
    ) -> Shape | None:
        if placement is None:
            return None
        if not isinstance(placement, Shard):
            return shape
        whole = list(shape)
        whole[placement.dim] *= self.program.mesh.size("tp")
        if padding is not None:
            whole[placement.dim] = padding.real(whole[placement.dim])
            return tuple(whole)
        whole[placement.dim] = self.real.get(whole[placement.dim], whole[placement.dim])
        return tuple(whole)

    def _factor(self, node: Node, dim: int) -> int | Fraction:
        held, padding = self.placed.get(node), self.paddings.of(node)
        if not isinstance(held, Shard) or held.dim != dim:
            return 1
        size = self.program.mesh.size("tp")
        return size if padding is None else size / padding.ratio


def _padded(program: Program) -> dict[int, int]:
    """Return the extents that only padding has, with those that they stand for."""
    own = {extent for spec in program.params for extent in spec.shape}
    padded = (spec for spec in program.params if spec.padded and not spec.is_widened)
    pairs = (pair for spec in padded for pair in zip(spec.padded, spec.shape, strict=True))
    return {wide: real for wide, real in pairs if wide not in own}


class _Comparison:
    """Puts both sides next to each other."""

    def __init__(self, program: Program, side: PlainSide, right: _Joined) -> None:
        self.program, self.side, self.left, self.right = program, side, side.reader, right
        self.terms = side.reader.terms
        self.found = ErasureFindings()

    def findings(self) -> ErasureFindings:
        """Compare outputs, counts and gradients, in this order."""
        self.found.wrong += self.right.problems
        self.found.unproven += self.right.paddings.unproven
        for port, number in self.side.wanted.outputs.items():
            self._compare(str(port), number, self.right.values.get(port))
        self._compare_counts()
        self._compare_model()
        for stage, bucket in self._stored():
            parts = self.right.parts(stage, bucket)
            if not parts:
                self._differ(
                    f"gradient of bucket '{bucket.name}'", None, self.right.gradient(stage, bucket)
                )
            for fqn, number in parts.items():
                want = self.side.wanted.gradients.get(fqn)
                self._compare(f"gradient of '{fqn}' (stage {stage})", want, number)
        self.found.rewrites = tuple(sorted(self.left.used | self.right.reader.used))
        return self.found

    def _stored(self) -> Iterator[tuple[int, Bucket]]:
        for bucket in self.program.buckets:
            trained = any(self.program.params[fqn].requires_grad for fqn in bucket.fqns)
            for stage in bucket.tied_stages or (bucket.stage,):
                if trained and self.program.training:
                    yield stage, bucket

    def _compare_counts(self) -> None:
        """The prelude counts what normalizers stand for: it must be as it was written."""
        have = counts(self.program.prelude, self.left)
        for name in dict.fromkeys((*self.side.counts, *have)):
            self._compare(f"count '{name}'", self.side.counts.get(name), have.get(name))

    def _compare_model(self) -> None:
        """What is trained, and what graphs call by the name of a constant, is the model's."""
        trained = {spec.fqn for spec in self.program.params.trainable()}
        for fqn in sorted(trained ^ self.side.trained):
            is_it = "is not trained, but" if fqn in self.side.trained else "is trained, but not"
            self.found.wrong.append(f"parameter '{fqn}' {is_it} in the plain model")
        for name, value in self.program.constants.items():
            captured = self.side.constants.get(name)
            is_same = captured is value
            if not is_same and (captured is None or not torch.equal(captured, value)):
                self.found.wrong.append(f"constant '{name}' is not the captured one")

    def _compare(self, what: str, want: int | None, have: int | None) -> None:
        if want == have:
            self.found.equal += 1
        else:
            self._differ(what, want, have)

    def _differ(self, what: str, want: int | None, have: int | None) -> None:
        reasons = self._unread()
        if want is not None and have is not None:
            want, have = self.terms.first_difference(want, have)
        text = "\n".join(
            (
                f"{what} is not the plain model's",
                f"  plain:    {self._side(want, self.left.makers)}",
                f"  compiled: {self._side(have, self.right.reader.makers)}",
            )
        )
        if reasons:
            self.found.unproven.append(f"{text}\n  but {reasons}")
        else:
            self.found.wrong.append(text)

    def _unread(self) -> str:
        """Return why a difference may be ours: what the comparison could not read."""
        ops = sorted({*self.right.reader.unread, *self.left.unread})
        if ops:
            return f"nothing here reads {', '.join(ops)}"
        if self.side.by_token and self._keeps_a_whole_loss():
            return "one loss runs over a split vocabulary and another one does not"
        if self.right.unknown:
            node = next(iter(self.right.unknown))
            return f"the placement of %{node} ({node.target}) is not known"
        return ""

    def _keeps_a_whole_loss(self) -> bool:
        nodes = (node for _, f in self.program.functions() for node in f.graph.nodes)
        return any(node.target in WHOLE_LOSSES for node in nodes)

    def _side(self, number: int | None, makers: Mapping[int, Maker]) -> str:
        if number is None:
            return "nothing"
        made = makers.get(number)
        text = self.terms.text(number)
        if made is None:
            return text
        where = f"{made.place}, {origin(made.node, made.path)}"
        return f"{text}\n            in {where}"
