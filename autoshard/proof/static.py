"""The checks that run nothing: types, erasure and order, as rows of the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from autoshard.ir.program import Program
from autoshard.proof.erasure import ErasureFindings, check_erasure
from autoshard.proof.order import prove_program, schedule_problems
from autoshard.proof.plain import PlainGraph, PlainSide
from autoshard.proof.types import TypeFindings, check_types
from autoshard.proof.verdict import Row, Status

SHOWN = 8  # findings of one row that are printed


def static_rows(program: Program, plain: PlainGraph | PlainSide | None) -> tuple[Row, ...]:
    """Return the rows of types, erasure and order for a program after the last pass."""
    broken = tuple(_ill_formed(program))
    if broken:
        types = Row("types", Status.WRONG, "graphs are not well formed", broken[:SHOWN])
        erasure = Row("erasure", Status.UNPROVEN, "graphs are not well formed")
        return types, erasure, timed(lambda: _order(program))
    start = time.perf_counter()
    found = check_types(program)
    types = _types(found, time.perf_counter() - start)
    return types, timed(lambda: _erasure(program, plain, found)), timed(lambda: _order(program))


def _ill_formed(program: Program) -> Iterator[str]:
    """Say which graphs read a value before it is made, or one of another graph, and where."""
    for name, function in program.functions():
        try:
            function.graph.lint()
        except RuntimeError as error:
            yield f"{name}: {error}"


def timed(check: Callable[[], Row]) -> Row:
    """Return the row of a check with the seconds that it took."""
    start = time.perf_counter()
    row = check()
    return Row(row.link, row.status, row.summary, row.findings, time.perf_counter() - start)


def _types(found: TypeFindings, seconds: float) -> Row:
    if found.wrong:
        summary = f"{len(found.wrong)} placements are wrong"
        return Row("types", Status.WRONG, summary, tuple(found.wrong[:SHOWN]), seconds)
    if found.unproven or found.unknown:
        ops = [f"{op}: no rule, {n} times" for op, n in sorted(found.unproven.items())]
        ops += [f"{op}: reads a value of unknown placement" for op in sorted(found.unknown)]
        summary = f"{len(found.unproven)} operators have no rule"
        return Row("types", Status.UNPROVEN, summary, tuple(ops[:SHOWN]), seconds)
    return Row("types", Status.PROVED, f"{found.nodes} placements re-inferred", (), seconds)


def _erasure(program: Program, plain: PlainGraph | PlainSide | None, types: TypeFindings) -> Row:
    if plain is None:
        return Row("erasure", Status.UNPROVEN, "the plain model's graph was not kept")
    return _erasure_row(check_erasure(program, plain, types.placed.get("tp", {})))


def _erasure_row(found: ErasureFindings) -> Row:
    count = len(found.wrong) + len(found.unproven)
    summary = f"{count} of {count + found.equal} results are not the plain model's"
    if found.wrong:
        return Row("erasure", Status.WRONG, summary, tuple(found.wrong[:SHOWN]))
    if found.unproven:
        return Row("erasure", Status.UNPROVEN, summary, tuple(found.unproven[:SHOWN]))
    summary = f"{found.equal} results are the plain model's joint graph, node for node"
    if found.rewrites:
        summary += f", up to: {', '.join(found.rewrites)}"
    return Row("erasure", Status.PROVED, summary)


def _order(program: Program) -> Row:
    problems = schedule_problems(program)
    if problems:
        return Row("order", Status.WRONG, "the schedule breaks its rules", tuple(problems[:SHOWN]))
    verdicts = [prove_program(program, semantics) for semantics in ("rendezvous", "streams")]
    bad = [v for v in verdicts if not v.ok]
    if bad:
        return Row("order", Status.WRONG, "the ranks can deadlock", (str(bad[0]),))
    return Row("order", Status.PROVED, "no deadlock under rendezvous and under ordered streams")
