"""Run a pipeline over a Program: contracts first, invariants after every pass, a journal."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from autoshard.collector import collector_paused
from autoshard.compiler.pass_base import Pass, PassContext
from autoshard.compiler.pipeline import Pipeline
from autoshard.diagnostics import AutoshardError, Remark
from autoshard.dsl.resolve import Resolved
from autoshard.ir.communication import node_traffic
from autoshard.ir.invariants import CHECKERS
from autoshard.ir.printer import print_program
from autoshard.ir.program import JournalEntry, Program

Observer = Callable[[Pass, Program], None]


@collector_paused()
def compile_program(
    captured: Program,
    resolved: Resolved,
    pipeline: Pipeline,
    *,
    until: str | None = None,
    remarks: list[Remark] | None = None,
    observe: Observer | None = None,
    check: bool = True,
) -> Program:
    """Rewrite ``captured`` in place by ``pipeline`` and return it.

    ``until`` names the pass or group to stop after. ``observe(pass, program)`` is called after
    each pass. ``check=False`` skips the re-check of invariants after each pass, not the contracts.
    Raises PassError when the pipeline is out of order or a pass leaves an invariant broken.
    """
    pipeline = pipeline if until is None else pipeline.until(until)
    pipeline.check(captured.holds)
    ctx = PassContext(resolved, [] if remarks is None else remarks)
    for step in pipeline.passes:
        _run_pass(step, captured, ctx, check)
        if observe is not None:
            observe(step, captured)
    return captured


def count_nodes(program: Program) -> int:
    """Return the number of call nodes in the program's current graphs."""
    graphs = (function.graph for _, function in program.functions())
    return sum(node.op == "call_function" for graph in graphs for node in graph.nodes)


def count_collectives(program: Program) -> dict[str, int]:
    """Return "axis kind" -> number of nodes, over the program's current graphs."""
    counts: Counter[str] = Counter()
    for _, function in program.functions():
        for node in function.graph.nodes:
            for traffic in node_traffic(node):
                counts[f"{traffic.axis} {traffic.kind}"] += 1
    return dict(sorted(counts.items()))


def _run_pass(step: Pass, program: Program, ctx: PassContext, check: bool) -> None:
    ctx.pass_name = step.name
    before, start = len(ctx.remarks), time.perf_counter()
    try:
        step.run(program, ctx)
    except AutoshardError as error:
        error.add_note(f"in pass '{step}'")
        raise
    program.holds = (program.holds - step.breaks) | step.establishes
    if check:
        _recheck(step, program)
    program.journal.append(
        JournalEntry(
            str(step),
            count_nodes(program),
            count_collectives(program),
            time.perf_counter() - start,
            len(ctx.remarks) - before,
        )
    )
    _dump(step, program)


def _recheck(step: Pass, program: Program) -> None:
    for name in sorted({"well_formed", "sourced", *program.holds} & set(CHECKERS)):
        try:
            CHECKERS[name](program)
        except AutoshardError as error:
            error.add_note(f"invariant '{name}' does not hold after pass '{step}'")
            raise


def _dump(step: Pass, program: Program) -> None:
    folder = os.environ.get("AUTOSHARD_DUMP")
    if folder is None:
        return
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    name = f"{len(program.journal):02d}-{step.name}.txt"
    (path / name).write_text(print_program(program))
