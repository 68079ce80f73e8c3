"""Measure one family: what each column of the coverage page says of it."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

import torch
from torch import nn

from autoshard.diagnostics import AutoshardError
from autoshard.dsl.draft_rules import proposed_rules
from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.capture import capture
from autoshard.ir.facts import describe
from autoshard.ir.program import Program
from autoshard.ir.promote import promote
from autoshard.ir.propose import propose
from autoshard.mesh import Mesh
from autoshard.source import Source
from autoshard.testing.coverage.families import Family, NotBuiltError, Sample, build
from autoshard.testing.equivalence import compare_compiled, reference_run
from autoshard.testing.lockstep import StepRecord

MICRO_BATCH = 2
LONGEST = 200  # characters of a reason
_BARE = re.compile(r"^error(?=\[)|^error: ")
USE = "use transformers.tp_plan"


@dataclass(frozen=True)
class Column:
    """One layout that every family is measured under."""

    name: str
    mesh: str
    microbatches: int
    sequence_parallel: bool = False
    blocks: str = ""


ZERO_3 = "zero { stage = 3, param_persistence_threshold = 0KiB }"
COLUMNS = (
    Column("tp2", "tp = 2", 2),
    Column("tp2 + sequence", "tp = 2", 2, sequence_parallel=True),
    Column("pp2", "pp = 2", 2, blocks="pipeline { split = auto(by=flops) }"),
    Column("zero3 dp2", "dp = 2", 1, blocks=ZERO_3),
    Column("tp2 x pp2", "pp = 2, tp = 2", 2, blocks="pipeline { split = auto(by=flops) }"),
)
CAPTURE = "capture"
NAMES = (CAPTURE, *(column.name for column in COLUMNS))


@dataclass(frozen=True)
class Cell:
    """What came out: equal, refused (with the reason), wrong, or crashed."""

    status: str
    reason: str = ""


@dataclass(frozen=True)
class Row:
    """One family of the page; ``note`` says why it has no cells."""

    family: str
    kind: str
    cells: dict[str, Cell] = field(default_factory=dict)
    note: str = ""
    plan: str = ""  # where its tensor rules come from
    split: float = 0.0  # the share of its parameters that tp 2 splits
    cpu_s: float = 0.0


def measure(family: Family, columns: tuple[Column, ...] = COLUMNS) -> Row:
    """Return the row of one family; nothing is raised."""
    start = time.process_time()
    try:
        sample = build(family)
    except NotBuiltError as error:
        return Row(family.name, family.kind, note=str(error))
    row = _measured(family, sample, columns)
    return Row(**{**row.__dict__, "cpu_s": round(time.process_time() - start, 1)})


def _measured(family: Family, sample: Sample, columns: tuple[Column, ...]) -> Row:
    row = Row(family.name, family.kind)
    micro = {name: leaf[:MICRO_BATCH] for name, leaf in sample.batch.items()}
    try:
        captured = capture(sample.model, micro, sample.loss, mesh=Mesh(()), compare=True)
        doubled = promote(captured)
        reference = reference_run(sample.model, sample.batch, sample.loss)
    except Exception as error:
        row.cells.update(dict.fromkeys(NAMES, judged(error)))
        return row
    row.cells[CAPTURE] = Cell("equal")
    rules = tensor_rules(sample.model, captured)
    split = 0.0
    for column in columns:
        try:
            cell, share = _cell(sample, doubled, reference, column, rules)
            split = max(split, share)
        except Exception as error:
            cell = judged(error)
        row.cells[column.name] = cell
    return Row(row.family, row.kind, row.cells, "", rules[0], round(split, 3))


def tensor_rules(model: nn.Module, captured: Program) -> tuple[str, str]:
    """Return where the rules of a model come from, and the rules.

    The model's own tp_plan or what the graph gives: the one that splits more of the parameters.
    """
    found = "\n".join(proposed_rules(describe(model), propose(captured, 2)))
    choices = [("init", found)] if found else []
    if getattr(model, "_tp_plan", None):
        choices.insert(0, ("hf", USE))
    shares = {rules: _share(model, captured, rules) for _, rules in choices}
    return max(choices, key=lambda choice: shares[choice[1]], default=("none", ""))


def _share(model: nn.Module, captured: Program, rules: str) -> float:
    """Return the share that these rules split, below zero where the tensor group refuses them."""
    try:
        plan = load(Source("tp", plan_text(COLUMNS[0], rules))).require()
        example = {leaf.name: torch.empty(leaf.shape, device="meta") for leaf in captured.leaves}
        compiled = compile_plan(model, plan, example, captured=captured, until="tensor")
    except AutoshardError:
        return -1.0
    return round(split_share(compiled.program), 2)


def plan_text(column: Column, rules: str) -> str:
    """Return the plan of a column."""
    sequence = "sequence_parallel = on\n" if column.sequence_parallel else ""
    tensor = f"tensor {{\n{sequence}{rules}\n}}" if "tp" in column.mesh else ""
    batch = f"micro_batch_size = {MICRO_BATCH}, num_microbatches = {column.microbatches}"
    head = f"autoshard 1\nmesh {{ {column.mesh} }}\nbatch {{ {batch} }}"
    return "\n".join((head, tensor, column.blocks))


def _cell(
    sample: Sample,
    captured: Program,
    reference: tuple[StepRecord, ...],
    column: Column,
    rules: tuple[str, str],
) -> tuple[Cell, float]:
    plan = load(Source(column.name, plan_text(column, rules[1]))).require()
    compiled = compile_plan(
        sample.model, plan, sample.batch, sample.loss, captured=captured, executable=True
    )
    program = compiled.program
    comparison = compare_compiled(program, sample.model, sample.batch, reference)
    wrong = comparison.first_wrong()
    share = split_share(program)
    if wrong is None:
        return Cell("equal"), share
    return Cell("wrong", f"{wrong.what}, step {wrong.step}: {wrong.error:.1e}"), share


def split_share(program: Program) -> float:
    """Return the share of the parameters' elements that are split over tp."""
    local = whole = 0
    for spec in program.params.trainable():
        size = torch.Size(spec.shape).numel()
        whole += size
        local += size if str(spec.placements.get("tp", "R")) != "R" else 0
    return local / max(whole, 1)


def judged(error: Exception) -> Cell:
    """Return the cell of an error: refused by name and code, or a crash.

    An invariant that broke has a message of ours, but no code: that is a crash too.
    """
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, AutoshardError) and error.code:
        return Cell("refused", _BARE.sub("", first)[:LONGEST])
    return Cell("crashed", f"{type(error).__name__}: {first}"[:LONGEST])
