"""Train a tiny GPT by every schedule, in lock step in float64, beside plain PyTorch.

    python -m autoshard.testing.pipelines [--quick] [--pp P] [--zero Z] [--part K/N] [--json]
    python -m autoshard.testing.pipelines --join PART.json ...

The cross: schedules x {2, 3, 4} pipeline ranks x {1 .. 8} micro-batches x ZeRO {0 .. 3} x {untied,
tied}, with two data parallel ranks above ZeRO 0. For each: loss, every gradient, the norm and the
updated parameters of two steps against one process, the order proof, and bit-equality of gradients
with the other schedules that cut the model into the same stages. Graphs don't depend on schedule
and micro-batches, so one compilation serves all schedules that place stages alike. Parts may run
apart: cells that must be bit-equal are never in different ones.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from autoshard.compiler.manager import compile_program
from autoshard.compiler.pass_base import PassContext
from autoshard.compiler.pipeline import Pipeline
from autoshard.dsl.load import load
from autoshard.dsl.resolve import Resolved, resolve
from autoshard.frontend import compile_plan
from autoshard.ir.batch import share_leaves
from autoshard.ir.capture import capture
from autoshard.ir.facts import describe
from autoshard.ir.invariants import CHECKERS
from autoshard.ir.program import Level, Program
from autoshard.ir.promote import promote
from autoshard.mesh import Mesh
from autoshard.model_facts import ModelFacts
from autoshard.passes.lower_schedule import LowerSchedule
from autoshard.passes.pipelines import default_pipeline
from autoshard.proof.order import prove_program
from autoshard.runtime.phases import Code, generate_code
from autoshard.schedule.make import SCHEDULES
from autoshard.source import Source
from autoshard.testing.equivalence import (
    TOLERANCE,
    Difference,
    differences,
    held_values,
)
from autoshard.testing.lockstep import StepRecord, adamw, run_lockstep
from autoshard.testing.models import Built, tiny_gpt

STEPS, MAX_NORM = 2, 0.5
SIZES = {"width": 8, "heads": 2, "vocab": 12, "length": 4}


@dataclass(frozen=True)
class Cell:
    """One way to train the tiny GPT: a row of the cross."""

    schedule: str
    pp: int
    microbatches: int
    zero: int = 0
    tied: bool = True

    @property
    def virtual_stages(self) -> int:
        """Return the stages a rank holds."""
        return SCHEDULES[self.schedule].virtual_stages[0] or 1

    @property
    def num_stages(self) -> int:
        """Return the stages of the model: one block each."""
        return self.pp * self.virtual_stages

    @property
    def dp(self) -> int:
        """Return the data parallel ranks: two where there is something to share."""
        return 2 if self.zero else 1

    @property
    def placement(self) -> tuple[int, ...]:
        """Return the rank of every stage."""
        return SCHEDULES[self.schedule].placement(self.pp, self.virtual_stages)

    @property
    def plan(self) -> str:
        """Return the plan as text; a threshold of 0 shards every parameter, however small."""
        virtual = f", virtual_stages = {self.virtual_stages}" if self.virtual_stages > 1 else ""
        persist = ", param_persistence_threshold = 0KiB" if self.zero == 3 else ""
        return f"""autoshard 1
mesh {{ pp = {self.pp}, dp = {self.dp} }}
batch {{ micro_batch_size = 1, num_microbatches = {self.microbatches} }}
pipeline {{ split = even(h.*), schedule = {self.schedule}{virtual} }}
zero {{ stage = {self.zero}{persist} }}
"""

    def __str__(self) -> str:
        tied = "tied" if self.tied else "untied"
        return f"{self.schedule} pp{self.pp} m{self.microbatches} zero{self.zero} {tied}"


@dataclass
class Result:
    """What a cell gave: its worst difference, what is wrong with it, and its gradients."""

    cell: Cell
    worst: Difference
    wrong: str = ""
    records: tuple[StepRecord, ...] = field(default=(), repr=False)


def cross() -> Iterator[Cell]:
    """Yield every cell; those that share a compilation stand together."""
    counts = range(1, 9)
    for pp, zero, tied, name in product((2, 3, 4), range(4), (False, True), SCHEDULES):
        yield from (Cell(name, pp, count, zero, tied) for count in counts)


def cover() -> Iterator[Cell]:
    """Yield a subset with every schedule, pipeline, count, ZeRO stage and tie of the cross.

    It has few different stages, which are what costs; counts go below, to and above the ranks.
    """
    for number, name in enumerate(SCHEDULES):
        kind = SCHEDULES[name].placement(2, SCHEDULES[name].virtual_stages[0] or 1)
        for pp, zero, tied in COVERED[kind]:
            yield Cell(name, pp, 1 + (number * 3 + pp * 5) % 8, zero, tied)


# Placement on two ranks -> ranks, ZeRO stage, and whether a weight is tied.
COVERED = {
    (0, 1): ((2, 0, False), (3, 2, True), (4, 3, True)),
    (0, 1, 0, 1): ((2, 1, True), (3, 0, True)),
    (0, 1, 1, 0): ((2, 1, True), (2, 2, False), (3, 3, True)),
}


def run_cell(cell: Cell, *, prove: bool = True) -> Result:
    """Train by one cell and say what differs from plain PyTorch."""
    program, code = schedule_cell(cell)
    values, shares = values_of(cell, program), local_batches(cell)
    records = run_lockstep(program, values, [shares] * STEPS, max_norm=MAX_NORM, code=code)
    worst = max(differences(records, reference_of(cell)), key=lambda d: d.error)
    wrong = "" if worst.error <= TOLERANCE else f"{worst.what}: {worst.error:.1e}"
    if prove and not wrong:
        wrong = prove_program(program).message
    return Result(cell, worst, wrong, records)


def schedule_cell(cell: Cell) -> tuple[Program, Code]:
    """Return the cell's program: graphs that are compiled once for all schedules alike."""
    graphs, code = _compiled(cell.placement, cell.pp, cell.zero, cell.tied)
    program = replace(graphs, schedule=None, num_microbatches=cell.microbatches)
    program.level = Level.JOINT
    LowerSchedule().run(program, PassContext(_resolved(cell)))
    CHECKERS["schedulable"](program)
    return program, code


def values_of(cell: Cell, program: Program) -> dict[str, Tensor]:
    """Return the model's first values in float64, by canonical name."""
    return held_values(_built(cell.num_stages, cell.tied)[0], program, torch.float64)


def local_batches(cell: Cell) -> list[dict[str, Tensor]]:
    """Return the batch of each data parallel rank."""
    batch = tiny_gpt(layers=1, batch=cell.microbatches * cell.dp, **SIZES)[1]
    return share_leaves(batch, cell.dp)


def reference_of(cell: Cell) -> tuple[StepRecord, ...]:
    """Return what plain PyTorch computes in one process."""
    return _reference(cell.num_stages, cell.tied, cell.microbatches * cell.dp)


def unequal(results: Sequence[Result]) -> list[str]:
    """Return the cells whose first gradients aren't bit-equal with those of others alike.

    Alike are schedules over the same stages. The gradients of a tied weight are added over ranks
    too, so then the stages must also lie on the same ranks.
    """
    first: dict[tuple, Result] = {}
    found = []
    for result in results:
        cell = result.cell
        place = cell.placement if cell.tied else cell.num_stages
        one = first.setdefault((place, cell.microbatches, cell.zero, cell.tied), result)
        ours, theirs = result.records[0].grads, one.records[0].grads
        odd = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
        if odd:
            found.append(f"{cell} and {one.cell} differ in {odd[0]}")
    return found


@cache
def _built(layers: int, tied: bool) -> Built:
    return tiny_gpt(layers=layers, batch=1, tied=tied, **SIZES)


@cache
def _compiled(placement: tuple[int, ...], pp: int, zero: int, tied: bool) -> tuple[Program, Code]:
    """Return the graphs of all cells with this placement, and their code."""
    # Two micro-batches: of one alone the loss would need no sum over micro-batches.
    alike = (Cell(name, pp, 2, zero, tied) for name in SCHEDULES)
    cell = next(c for c in alike if c.placement == placement)
    resolved, phased = _resolved(cell), _phased(cell.num_stages, tied)
    passes = default_pipeline().passes
    names = [step.name for step in passes]
    rest = passes[names.index("shard-storage") : names.index("lower-schedule")]
    program = compile_program(phased.fork(resolved.mesh), resolved, Pipeline(rest))
    return program, generate_code(program)


@cache
def _phased(num_stages: int, tied: bool) -> Program:
    """Return the model in stages and phases: the same for every mesh of so many stages."""
    model, batch, loss = _built(num_stages, tied)
    captured = promote(capture(model, batch, loss, mesh=Mesh(()), compare=False))
    plan = load(Source("cell.plan", Cell("1f1b", num_stages, 2, 0, tied).plan)).require()
    until = "split-phases"
    return compile_plan(model, plan, batch, loss, captured=captured, until=until).program


@cache
def _facts(layers: int, tied: bool) -> ModelFacts:
    return describe(_built(layers, tied)[0])


def _resolved(cell: Cell) -> Resolved:
    plan = load(Source("cell.plan", cell.plan)).require()
    return resolve(plan, _facts(cell.num_stages, cell.tied))


@cache
def _reference(layers: int, tied: bool, samples: int) -> tuple[StepRecord, ...]:
    """Train the plain model in float64 on the whole batch, in one process."""
    model, _, loss = _built(layers, tied)
    model = copy.deepcopy(model).double()
    batch = tiny_gpt(layers=1, batch=samples, **SIZES)[1]
    optimizer = adamw(model.parameters())
    records = []
    for _ in range(STEPS):
        value = loss(model(batch["ids"]), batch)
        value.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        params = {n: p.detach().clone() for n, p in model.named_parameters()}
        records.append(StepRecord(value.detach(), grads, norm, params))
    return tuple(records)


def part(cells: Sequence[Cell], number: int, of: int) -> list[Cell]:
    """Return the ``number``-th of so many parts, from 1; cells that may be bit-equal stay together.

    There are eight sorts of cells, by ZeRO stage and tie: more parts leave some empty.
    """
    sorts = sorted({(cell.zero, cell.tied) for cell in cells})[number - 1 :: of]
    return [cell for cell in cells if (cell.zero, cell.tied) in sorts]


def run_cells(cells: Sequence[Cell]) -> dict:
    """Train by all cells, a line of progress each on stderr, and return what was found as data."""
    start, results = time.perf_counter(), []
    for number, cell in enumerate(cells, 1):
        results.append(result := run_cell(cell))
        error = f"{result.worst.error:.1e}"
        print(f"{number}/{len(cells)} {cell}: {result.wrong or error}", file=sys.stderr, flush=True)
    worst = max(results, key=lambda r: r.worst.error)
    return {
        "cells": [str(cell) for cell in cells],
        "wrong": [f"{result.cell}: {result.wrong}" for result in results if result.wrong],
        "not_bit_equal": unequal(results),
        "worst": {"cell": str(worst.cell), "what": worst.worst.what, "error": worst.worst.error},
        "seconds": time.perf_counter() - start,
    }


def join(found: Sequence[dict]) -> dict:
    """Return the findings of parts as one; a cell that ran in several counts once."""
    return {
        "cells": sorted({cell for one in found for cell in one["cells"]}),
        "wrong": [text for one in found for text in one["wrong"]],
        "not_bit_equal": [text for one in found for text in one["not_bit_equal"]],
        "worst": max((one["worst"] for one in found), key=lambda worst: worst["error"]),
        "seconds": sum(one["seconds"] for one in found),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cross and print what was found; 1 when anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the subset that the tests run")
    parser.add_argument("--pp", type=int, help="only this number of pipeline ranks")
    parser.add_argument("--zero", type=int, help="only this ZeRO stage")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="the K-th of up to 8 parts")
    parser.add_argument("--join", nargs="+", metavar="JSON", help="add up parts, run before")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    if args.join:
        found = join([json.loads(Path(path).read_text()) for path in args.join])
    else:
        pipelines = (args.pp,) if args.pp else (2, 3, 4)
        stages = range(4) if args.zero is None else (args.zero,)
        chosen = cover() if args.quick else cross()
        cells = [cell for cell in chosen if cell.pp in pipelines and cell.zero in stages]
        cells = part(cells, *map(int, args.part.split("/")))
        if not cells:
            parser.error(f"no cell of the cross is in part {args.part} of what was asked for")
        found = run_cells(cells)
    print(json.dumps(found, indent=2) if args.json else _text(found))
    return 1 if found["wrong"] or found["not_bit_equal"] else 0


def _text(found: dict) -> str:
    worst = found["worst"]
    lines = [
        f"{len(found['cells'])} cells in {found['seconds']:.0f} s: {len(found['wrong'])} wrong, "
        f"{len(found['not_bit_equal'])} not bit-equal with schedules alike",
        f"worst: {worst['cell']}, {worst['what']}, relative error {worst['error']:.1e}",
    ]
    return "\n".join([*lines, *found["wrong"][:20], *found["not_bit_equal"][:20]])


if __name__ == "__main__":
    sys.exit(main())
