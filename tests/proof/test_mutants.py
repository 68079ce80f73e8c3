"""Each planted fault is caught: by the static checks, or by lock step; the sound program passes."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from autoshard.diagnostics import AutoshardError
from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.capture import capture
from autoshard.ir.program import Program
from autoshard.ir.promote import promote
from autoshard.mesh import Mesh
from autoshard.plan import Plan
from autoshard.proof.order import prove_program
from autoshard.proof.types import check_types
from autoshard.proof.verdict import Status
from autoshard.source import Source
from autoshard.testing.equivalence import compare_compiled, reference_run
from autoshard.testing.models import tiny_gpt, token_batch
from autoshard.testing.mutants import FAULTS, Mutant, localize_normalizer, wrong_axis
from autoshard.testing.plans import Layout, plan_text
from autoshard.verify import verify

LAYOUT = Layout(dp=2, pp=2, tp=2, zero=1, microbatches=2)
# The link that sees each fault first. Numbers are asked only where the proofs see nothing.
SEEN_BY = {
    "drop-collective": "types",
    "double-collective": "types",
    "wrong-axis": "types",
    "wrong-scale": "numbers",
    "lose-tied-gradient": "numbers",
    "sum-bias-twice": "types",
    "swap-boundary": "order",
    "localize-normalizer": "numbers",
}


@cache
def built():
    return tiny_gpt(layers=2, batch=LAYOUT.samples, length=8)


@cache
def captured() -> Program:
    model, batch, loss = tiny_gpt(layers=2, batch=LAYOUT.micro_batch_size, length=8)
    return promote(capture(model, batch, loss, mesh=Mesh(()), compare=False))


@cache
def reference():
    return reference_run(*built(), steps=1)


def plan(layout: Layout = LAYOUT) -> Plan:
    return load(Source("p.plan", plan_text("tiny_gpt", layout))).require()


def compiled() -> Program:
    model, batch, loss = built()
    return compile_plan(model, plan(), batch, loss, captured=captured(), check=False).program


def caught_by(program: Program) -> str:
    """Return what notices a fault: "types", "order", "numbers", or "" for nothing."""
    if check_types(program).wrong:
        return "types"
    if not all(prove_program(program, s).ok for s in ("rendezvous", "streams")):
        return "order"
    model, batch, _ = built()
    try:
        comparison = compare_compiled(program, model, batch, reference())
    except AutoshardError:
        return "numbers"
    return "numbers" if comparison.first_wrong() else ""


def test_the_sound_program_raises_no_alarm() -> None:
    program = compiled()
    assert check_types(program).unproven == {}
    assert caught_by(program) == ""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(fault: Mutant) -> None:
    program = compiled()
    assert fault.plant(program), f"{fault.name} found no place to break"
    assert caught_by(program) == SEEN_BY[fault.name], fault.what


def test_a_micro_batch_of_one_sample_raises_no_alarm() -> None:
    one = replace(LAYOUT, micro_batch_size=1)
    model, batch, loss = tiny_gpt(layers=2, batch=one.samples, length=8)
    found = check_types(compile_plan(model, plan(one), batch, loss, check=False).program)
    assert found.wrong == [] and found.unproven == {}


def test_verify_says_which_link_is_wrong_and_where() -> None:
    model, batch, loss = built()
    verdict = verify(model, plan(), batch, loss, numbers=False, mutate=wrong_axis)
    assert not verdict.is_good and str(verdict).endswith("WRONG: do not run this plan")
    (finding, *_) = verdict.row("types").findings
    assert finding.startswith("stage 0, F, tp: ")


def test_verify_breaks_what_it_runs_too() -> None:
    model, batch, loss = built()
    verdict = verify(model, plan(), batch, loss, steps=1, mutate=localize_normalizer)
    assert verdict.row("types").status is Status.PROVED
    (finding,) = verdict.row("numbers").findings
    assert finding.startswith("first difference: loss, step 0")


def test_verify_trains_with_dropout_on_both_sides() -> None:
    one = Layout(pp=2, microbatches=2)
    model, batch, loss = tiny_gpt(layers=2, batch=one.samples, length=8, dropout=0.2)
    verdict = verify(model, plan(one), batch, loss, steps=2)
    assert verdict.row("numbers").status is Status.CHECKED, str(verdict)


def test_a_capture_that_was_not_compared_is_not_called_equal() -> None:
    with torch.device("meta"):
        model, _, loss = tiny_gpt(layers=2, length=8)
    verdict = verify(model, plan(), token_batch(LAYOUT.samples, 8), loss, numbers=False)
    assert verdict.row("capture").status is Status.SKIPPED
    assert "meta device" in verdict.row("capture").summary
    assert verdict.is_good and not verdict.is_complete
