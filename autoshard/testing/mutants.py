"""Plant every fault of the catalogue in compiled programs and see which check catches it.

    python -m autoshard.testing.mutants --quick

For each fault: in how many places it was planted, and which link saw it first: types, erasure or
order, which run nothing, or else the numbers of lock step. Programs without a fault must raise no
alarm.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from autoshard.diagnostics import AutoshardError
from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.capture import capture
from autoshard.ir.program import Program
from autoshard.ir.promote import promote
from autoshard.mesh import Mesh
from autoshard.proof.plain import PlainSide
from autoshard.proof.static import static_rows
from autoshard.proof.verdict import Status
from autoshard.source import Source
from autoshard.testing import (
    graph_faults,
    runtime_faults,
    storage_faults,
    told_faults,
    type_faults,
)
from autoshard.testing.equivalence import compare_compiled, reference_run
from autoshard.testing.faults import Fault
from autoshard.testing.models import Built, tiny_gpt, tiny_hf
from autoshard.testing.plans import Layout, plan_text

FAULTS: tuple[Fault, ...] = (
    *graph_faults.FAULTS,
    *storage_faults.FAULTS,
    *told_faults.FAULTS,
    *type_faults.FAULTS,
)
STATIC = ("types", "erasure", "order")
LINKS = (*STATIC, "numbers")
LENGTH = 8


@dataclass(frozen=True)
class Cell:
    """One program to break: a model, a layout, and what the model is built with."""

    family: str
    layout: Layout
    dropout: float = 0.0
    vocab: int = 96
    padded: bool = False
    kept_heads: bool = False  # two ranks keep each key head
    compute: str = ""  # the type of a mixed precision program, which no number is compared of

    def __str__(self) -> str:
        extras = {"dropout": self.dropout, "padded": self.padded, "kept heads": self.kept_heads}
        extras |= {self.compute: self.compute}
        return " ".join(
            [self.family, str(self.layout), *(n for n, is_so in extras.items() if is_so)]
        )

    def built(self, samples: int) -> Built:
        """Return the model, a batch of so many samples, and the loss."""
        sizes = {"layers": 2, "batch": samples, "length": LENGTH, "vocab": self.vocab}
        if self.family == "tiny_gpt":
            model, *rest = tiny_gpt(dropout=self.dropout, **sizes)
        else:
            model, *rest = tiny_hf(self.family, **sizes)
        return (model.float() if self.compute else model, *rest)

    def plan(self) -> str:
        """Return the plan's text."""
        extra = f"precision {{ compute = {self.compute} }}\n" if self.compute else ""
        text = plan_text(self.family, self.layout, extra)
        if self.kept_heads:
            apart = "q_proj: colwise, self_attn.{k,v}_proj: colwise(replicate=2)"
            text = text.replace("{q,k,v}_proj: colwise", apart)
        return text.replace(": vocab", ": vocab(pad=8)") if self.padded else text


QUICK = (
    Cell("tiny_gpt", Layout(dp=2, pp=2, tp=2, zero=1, microbatches=2), dropout=0.1),
    Cell("tiny_gpt", Layout(dp=2, tp=2, zero=3, microbatches=2), vocab=90, padded=True),
    Cell("tiny_gpt", Layout(dp=4, shard=2, zero=2, microbatches=2)),
    Cell("tiny_gpt", Layout(dp=2, tp=2, zero=1, microbatches=2), compute="bf16"),
)
CELLS = (
    *QUICK,
    Cell("gpt2", Layout(dp=2, pp=2, tp=2, zero=0, microbatches=2)),
    Cell("llama", Layout(dp=2, pp=2, tp=2, zero=3, microbatches=2)),
    Cell("bloom", Layout(pp=2, tp=2, microbatches=4, schedule="gpipe")),
    Cell("tiny_gpt", Layout(dp=2, pp=2, zero=2, microbatches=4)),
    Cell("gpt2", Layout(dp=2, zero=2, microbatches=2)),
    Cell("tiny_gpt", Layout(dp=2, tp=2, zero=3, microbatches=2, sequence=True), dropout=0.1),
    Cell("llama", Layout(tp=8, microbatches=2), kept_heads=True),
    Cell("gpt2", Layout(dp=2, pp=2, zero=3, microbatches=2), compute="bf16"),
)


@dataclass(frozen=True)
class Result:
    """What became of one fault in one place: ``caught`` names the link, "" when nothing saw it."""

    cell: str
    fault: str
    place: int
    caught: str


class Subject:
    """One compiled program, and what is needed to judge broken copies of it."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.model, self.batch, self.loss = cell.built(cell.layout.samples)
        plan = load(Source("p.plan", cell.plan())).require()
        compiled = compile_plan(
            self.model, plan, self.batch, self.loss, captured=_captured(cell), check=False
        )
        self.program = compiled.program
        self.plain = PlainSide.read(compiled.plain, self.program)

    @cache  # noqa: B019 - a subject lives as long as the script
    def reference(self) -> Sequence:
        """Return two steps of the plain model."""
        return reference_run(self.model, self.batch, self.loss, steps=2)

    def caught_by(
        self,
        program: Program,
        context: AbstractContextManager | None = None,
        *,
        numbers: bool = True,
    ) -> str:
        """Return the first link that sees something wrong with a program, "" for none.

        ``context`` is what is wrong with the run-time meanwhile.
        """
        with context or nullcontext():
            try:
                rows = static_rows(program, self.plain)
            except AutoshardError:
                return "types"
            wrong = next((row.link for row in rows if row.status is Status.WRONG), "")
            runs = numbers and not self.cell.compute  # else rounding differs, not the program
            return wrong or ("numbers" if runs and self.differs(program) else "")

    def unproven(self) -> list[str]:
        """Return the links that are not proved for the program without a fault."""
        rows = static_rows(self.program, self.plain)
        return [row.link for row in rows if row.status is not Status.PROVED]

    def differs(self, program: Program) -> bool:
        """Tell whether lock step stops or gives other numbers than the plain model."""
        reference = self.reference()
        try:
            done = compare_compiled(program, self.model, self.batch, reference)
        except Exception:  # whatever it is, the run was stopped
            return True
        return done.first_wrong() is not None


@cache
def _captured(cell: Cell) -> Program:
    key = replace(cell, layout=Layout(micro_batch_size=cell.layout.micro_batch_size), padded=False)
    if key != cell:
        return _captured(key)
    model, batch, loss = cell.built(cell.layout.micro_batch_size)
    captured = capture(model, batch, loss, mesh=Mesh(()), compare=False)
    return captured if cell.compute else promote(captured)


def named(name: str) -> Fault:
    """Return a fault of the catalogue."""
    return next(fault for fault in FAULTS if fault.name == name)


def run(
    cells: Sequence[Cell], most: int, *, seconds: float = float("inf")
) -> tuple[list[Result], list[str]]:
    """Return what became of up to ``most`` places of each fault in each cell, and false alarms.

    After ``seconds`` only faults that were not planted yet are.
    """
    start = time.perf_counter()
    results: list[Result] = []
    alarms: list[str] = []
    planted: Counter[str] = Counter()
    for cell in cells:
        subject = Subject(cell)
        alarm = subject.caught_by(subject.program)
        alarms += [f"{cell}: {alarm}"] if alarm else []
        alarms += [f"{cell}: {link} is not proved" for link in subject.unproven()]
        for fault, place in _chosen(subject.program, most):
            if planted[fault.name] and time.perf_counter() - start > seconds:
                continue
            planted[fault.name] += 1
            results.append(_plant(subject, fault, place))
        if cell is CELLS[0]:
            results += list(_runtime(subject))
    return results, alarms


def _chosen(program: Program, most: int) -> Iterator[tuple[Fault, int]]:
    """Yield each fault with places spread over all that it has."""
    for fault in FAULTS:
        count = fault.count(program)
        places = {round(i * (count - 1) / max(most - 1, 1)) for i in range(min(most, count))}
        yield from ((fault, place) for place in sorted(places))


def _plant(subject: Subject, fault: Fault, place: int) -> Result:
    broken = subject.program.fork()
    fault.plant(broken, place)
    return Result(str(subject.cell), fault.name, place, subject.caught_by(broken))


def _runtime(subject: Subject) -> Iterator[Result]:
    """Yield what became of faults of the run-time, which are in no graph."""
    for name, context in runtime_faults.FAULTS.items():
        caught = subject.caught_by(subject.program, context())
        yield Result(str(subject.cell), name, 0, caught)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 when a fault was missed or an alarm was false."""
    parser = argparse.ArgumentParser(prog="python -m autoshard.testing.mutants")
    parser.add_argument("--quick", action="store_true", help="two programs, within 50 seconds")
    parser.add_argument("--most", type=int, default=3, help="places of a fault in one program")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--part", default="1/1", metavar="K/N", help="each N-th program from the K-th"
    )
    parser.add_argument("--join", nargs="+", metavar="JSON", help="the table of parts, run before")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    limit = 30.0 if args.quick else float("inf")
    if args.join:
        results, alarms = _joined(args.join)
    else:
        number, of = map(int, args.part.split("/"))
        cells = (QUICK if args.quick else CELLS)[number - 1 :: of]
        results, alarms = run(cells, 1 if args.quick else args.most, seconds=limit)
    print(json.dumps(facts(results, alarms)) if args.json else table(results, alarms))
    return 1 if alarms or any(not result.caught for result in results) else 0


def _joined(paths: Sequence[str]) -> tuple[list[Result], list[str]]:
    """Return what the parts, printed as JSON, have found together."""
    parts = [json.loads(Path(path).read_text()) for path in paths]
    results = [Result(**found) for part in parts for found in part["results"]]
    return results, [alarm for part in parts for alarm in part["alarms"]]


def facts(results: Sequence[Result], alarms: Sequence[str]) -> dict[str, object]:
    """Return the figures of a run as plain data."""
    caught = Counter(result.caught for result in results)
    return {
        "mutants": len(results),
        "caught": len(results) - caught[""],
        "caught_statically": sum(caught[link] for link in STATIC),
        "false_alarms": len(alarms),
        "alarms": list(alarms),
        "rows": [
            {"fault": name, "planted": sum(row.values()), **{k: row[k] for k in (*LINKS, "missed")}}
            for name, row in _rows(results).items()
        ],
        "results": [vars(result) for result in results],
    }


def table(results: Sequence[Result], alarms: Sequence[str]) -> str:
    """Return the table as text."""
    rows = _rows(results)
    width = max(map(len, rows))
    heads = ("planted", *LINKS, "missed")
    lines = [f"{'fault':<{width}}  " + "  ".join(f"{head:>7}" for head in heads)]
    for name, row in rows.items():
        numbers = (sum(row.values()), *(row[link] for link in (*LINKS, "missed")))
        lines.append(f"{name:<{width}}  " + "  ".join(f"{n or '.':>7}" for n in numbers))
    found = facts(results, alarms)
    total, caught, static = (found[k] for k in ("mutants", "caught", "caught_statically"))
    lines.append(
        f"{total} mutants, {caught} caught ({caught / total:.1%}), {static} of them without "
        f"running numbers ({static / total:.1%}), {len(alarms)} false alarms"
    )
    lines += [f"missed: {r.fault} at place {r.place} of {r.cell}" for r in results if not r.caught]
    return "\n".join([*lines, *(f"false alarm: {alarm}" for alarm in alarms)])


def _rows(results: Sequence[Result]) -> dict[str, Counter[str]]:
    rows: dict[str, Counter[str]] = {}
    for result in results:
        rows.setdefault(result.fault, Counter())[result.caught or "missed"] += 1
    return rows


if __name__ == "__main__":
    sys.exit(main())
