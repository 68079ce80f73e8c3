"""Fuzz plans: random and damaged texts are told what is wrong with them; what compiles is equal.

    python -m autoshard.testing.fuzz --texts 2000 --plans 50 --numbers 10

Texts are read and fitted to a model: nothing but our own errors may come out, each with line and
column. Plans are drawn for small models and compiled: types, erasure and order must find nothing
wrong, and a sample must equal the plain model in lock step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random

import torch

from autoshard.diagnostics import AutoshardError, Diagnostic, InternalError, render
from autoshard.dsl.formatter import format_text
from autoshard.dsl.load import load
from autoshard.dsl.resolve import examine
from autoshard.frontend import compile_plan
from autoshard.ir.facts import describe
from autoshard.model_facts import ModelFacts
from autoshard.proof.static import static_rows
from autoshard.proof.verdict import Status
from autoshard.source import Source
from autoshard.testing.equivalence import compare_compiled, reference_run
from autoshard.testing.random_plans import Drawn, damaged, draw
from autoshard.testing.shrink import shrink

SLOW_S = 10.0  # a text that takes longer counts as a hang


@dataclass
class Findings:
    """How many inputs ended how, and what must not happen, with the input that shows it."""

    counts: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)

    def add(self, outcome: str, *, bad: str = "") -> None:
        """Count one outcome; ``bad`` says why it must not happen."""
        self.counts[outcome] += 1
        if bad:
            self.bad.append(f"{outcome}: {bad}")


def check_text(text: str, findings: Findings, facts: ModelFacts | None = None) -> None:
    """Read, fit and format one text; count how it ended."""
    start = time.perf_counter()
    source = Source("fuzz.plan", text)
    try:
        diagnostics = _told(source, facts)
        _formats(source)
    except Exception:  # anything else than our own errors is what we look for
        findings.add("traceback", bad=f"{text!r}\n{traceback.format_exc()}")
        return
    if time.perf_counter() - start > SLOW_S:
        findings.add("hang", bad=repr(text))
    homeless = [d for d in diagnostics if d.span is None]
    if homeless:
        findings.add("error without a place", bad=f"{text!r}: {homeless[0].message}")
    else:
        findings.add("refused with line and column" if diagnostics else "accepted")


def _told(source: Source, facts: ModelFacts | None) -> list[Diagnostic]:
    loaded = load(source)
    found = list(loaded.diagnostics)
    if loaded.complete:
        found += examine(loaded.plan, facts, None).diagnostics
    errors = [d for d in found if d.severity.name == "ERROR"]
    for diagnostic in found:
        assert render(diagnostic)
    return errors


def _formats(source: Source) -> None:
    try:
        once = format_text(source)
    except AutoshardError:
        return
    assert format_text(Source("again.plan", once)) == once, "formatting twice changes the text"


def check_plan(drawn: Drawn, findings: Findings, *, numbers: bool) -> None:
    """Compile one drawn plan, prove it and, with ``numbers``, run it; count how it ended.

    One that must not end so is made smaller before it is told.
    """
    outcome, bad = _ended(drawn, numbers)
    if bad:
        drawn = shrink(drawn, lambda other: _ended(other, numbers)[0] == outcome)
        _, bad = _ended(drawn, numbers)
    findings.add(outcome, bad=bad and f"{drawn}\n{drawn.plan}{bad}")


def _ended(drawn: Drawn, numbers: bool) -> tuple[str, str]:
    """Return how a plan ended, and why it must not."""
    try:
        return _judge(drawn, numbers)
    except AutoshardError as error:
        is_ours = isinstance(error, InternalError)
        return ("internal error", str(error)) if is_ours else ("refused", "")
    except Exception:  # anything else than our own errors is what we look for
        return "traceback", traceback.format_exc()


def _judge(drawn: Drawn, numbers: bool) -> tuple[str, str]:
    model, batch, loss = drawn.built(drawn.samples)
    plan = load(Source("fuzz.plan", drawn.plan)).require()
    dtype = torch.float64
    compiled = compile_plan(model, plan, batch, loss, dtype=dtype, executable=True)
    rows = static_rows(compiled.program, compiled.plain)
    wrong = [row for row in rows if row.status is Status.WRONG]
    if wrong:
        return "alarm", "\n".join((wrong[0].summary, *wrong[0].findings))
    if not numbers:
        open_rows = [row.link for row in rows if row.status is not Status.PROVED]
        return f"proved but for {', '.join(open_rows)}" if open_rows else "proved", ""
    reference = reference_run(model, batch, loss, steps=1)
    comparison = compare_compiled(compiled.program, model, batch, reference)
    first = comparison.first_wrong()
    return ("unequal", str(first)) if first else ("proved and equal in lock step", "")


def run_texts(count: int, seed: int) -> Findings:
    """Check ``count`` texts: drawn plans, half of them damaged."""
    rng, findings = Random(seed), Findings()
    for number in range(count):
        drawn = draw(rng)
        text = damaged(rng, drawn.plan) if number % 2 else drawn.plan
        check_text(text, findings, _facts(drawn.family))
    return findings


@cache
def _facts(family: str) -> ModelFacts:
    model, _, _ = Drawn(family, 2, 8, 96, 0.0, 2, 2, "").built(2)
    return describe(model)


def run_plans(numbers: Iterable[int], seed: int, in_lock_step: int) -> Findings:
    """Compile and prove the drawn plans of these numbers; the first that compile run, too."""
    findings = Findings()
    for number in numbers:
        equal = findings.counts["proved and equal in lock step"]
        drawn = draw(Random(f"{seed} {number}"))
        check_plan(drawn, findings, numbers=equal < in_lock_step)
    return findings


def main(argv: Sequence[str] | None = None) -> int:
    """Print what became of the inputs; return 1 when something happened that must not."""
    parser = argparse.ArgumentParser(prog="python -m autoshard.testing.fuzz")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--plans", type=int, default=20, help="plans to compile and prove")
    parser.add_argument("--numbers", type=int, default=5, help="of these, in lock step")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="each N-th plan from the K-th")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    first, step = map(int, args.part.split("/"))
    plans = range(first - 1, args.plans, step)
    parts: dict[str, Callable[[], Findings]] = {
        "texts": lambda: run_texts(args.texts, args.seed),
        "plans": lambda: run_plans(plans, args.seed, args.numbers),
    }
    found = {}
    for name, part in parts.items():
        start = time.perf_counter()
        found[name] = part()
        if not args.json:
            print(_text(name, found[name], time.perf_counter() - start))
    if args.json:
        print(json.dumps({n: {"counts": f.counts, "bad": f.bad} for n, f in found.items()}))
    return 1 if any(f.bad for f in found.values()) else 0


def _text(name: str, findings: Findings, seconds: float) -> str:
    lines = [
        f"{findings.counts.total()} {name} in {seconds:.0f} s, seen to fail: {len(findings.bad)}"
    ]
    lines += [f"  {count:>6}  {outcome}" for outcome, count in findings.counts.most_common()]
    return "\n".join([*lines, *findings.bad[:5]])


if __name__ == "__main__":
    sys.exit(main())
