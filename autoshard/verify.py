"""``verify``: is the compiled plan equal to the plain model, and free of deadlock?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from autoshard.diagnostics import AutoshardError
from autoshard.dsl.resolve import resolve
from autoshard.frontend import compile_plan, first_microbatch, global_batch
from autoshard.ir.capture import capture
from autoshard.ir.compare import CompareReport
from autoshard.ir.facts import describe
from autoshard.ir.program import Program
from autoshard.plan import Plan
from autoshard.proof.static import static_rows, timed
from autoshard.proof.verdict import Row, Status, Verdict
from autoshard.testing.equivalence import (
    TOLERANCE,
    Comparison,
    compare_compiled,
    reference_run,
)
from autoshard.testing.kernel_check import kernel_row


def verify(
    model: nn.Module,
    plan: Plan,
    batch: object,
    loss: Callable[..., Tensor] | None = None,
    *,
    numbers: bool = True,
    steps: int = 2,
    mutate: Callable[[Program], object] | None = None,
) -> Verdict:
    """Check capture, placement types, deadlock order and, in lock step, the numbers.

    ``batch`` is the global batch, or less of it: then its samples are repeated, rolled.
    ``mutate`` may break each compiled program first. Raises an
    AutoshardError only where the plan does not compile.
    """
    resolved = resolve(plan, describe(model))
    resolved.require_executable()
    captured = capture(
        model, first_microbatch(batch, resolved), loss, mesh=resolved.mesh, compare=True
    )
    compiled = compile_plan(model, plan, batch, loss, captured=captured)
    if mutate is not None:
        mutate(compiled.program)
    rows = [_capture(captured)]
    rows += static_rows(compiled.program, compiled.plain)
    if numbers:
        doubled = compile_plan(model, plan, batch, loss, dtype=torch.float64, captured=captured)
        if mutate is not None:
            mutate(doubled.program)
        whole = global_batch(batch, resolved)
        rows.append(timed(lambda: _numbers(model, doubled.program, whole, loss, steps)))
    rows += [_generated(rows), timed(lambda: kernel_row(compiled.program)), _optimizer(rows, steps)]
    return Verdict(tuple(rows))


def _capture(captured: Program) -> Row:
    report = captured.compared
    assert isinstance(report, CompareReport), "capture was asked to compare"
    if not report.was_compared:
        return Row("capture", Status.SKIPPED, report.reason)
    summary = (
        f"loss and every gradient equal the eager model's: {report.loss:.0e} and "
        f"{report.gradient:.0e} (limit {report.tolerance:.0e})"
    )
    return Row("capture", Status.CHECKED, summary)


def _has_run(rows: Sequence[Row]) -> bool:
    return rows[-1].link == "numbers" and rows[-1].status is Status.CHECKED


def _generated(rows: Sequence[Row]) -> Row:
    """Lock step runs the very text that ranks run; without it nothing compares text and graph."""
    if _has_run(rows):
        return Row("code generation", Status.CHECKED, "lock step ran the code that ranks run")
    return Row("code generation", Status.UNPROVEN, "its code was not run")


def _optimizer(rows: Sequence[Row], steps: int) -> Row:
    if _has_run(rows):
        return Row(
            "optimizer", Status.CHECKED, f"norm, clipping, {steps} AdamW steps on all shards"
        )
    return Row("optimizer", Status.UNPROVEN, "no step was made")


def _numbers(
    model: nn.Module,
    program: Program,
    batch: object,
    loss: Callable[..., Tensor] | None,
    steps: int,
) -> Row:
    """Run all ranks in lock step in float64 beside the captured model on one process."""
    try:
        reference = reference_run(model, batch, loss, steps=steps)
        comparison = compare_compiled(program, model, batch, reference)
    except AutoshardError as error:
        return Row("numbers", Status.WRONG, "lock step stopped", (str(error),))
    return _judge(comparison, program, steps)


def _judge(comparison: Comparison, program: Program, steps: int) -> Row:
    wrong = comparison.first_wrong()
    if wrong is not None:
        finding = (
            f"first difference: {wrong.what}, step {wrong.step}: relative error {wrong.error:.2e}, "
            f"ours / reference = {wrong.ratio:.4g}{ratio_hint(wrong.ratio, program)}"
        )
        return Row("numbers", Status.WRONG, "lock step differs from the plain model", (finding,))
    worst = comparison.worst
    summary = (
        f"{program.mesh.world_size} ranks, {steps} steps in float64: loss, gradients, norm and "
        f"parameters within {worst.error:.1e} (limit {TOLERANCE:.0e})"
    )
    return Row("numbers", Status.CHECKED, summary)


def ratio_hint(ratio: float, program: Program) -> str:
    """Say which degree of parallelism a wrong factor looks like; "" for none."""
    sizes = {name: program.mesh.size(name) for name in ("tp", "dp", "pp")}
    sizes["the number of micro-batches"] = program.num_microbatches
    for name, size in sizes.items():
        if size > 1 and abs(ratio - size) < 1e-3 * size:
            return f": a factor {name}"
        if size > 1 and abs(ratio * size - 1) < 1e-3:
            return f": a factor 1 / {name}"
    return ""
