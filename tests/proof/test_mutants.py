"""Each planted fault is caught: by the static checks, or by lock step; the sound program passes."""

from functools import cache

import pytest

from autoshard.diagnostics import AutoshardError
from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.capture import capture
from autoshard.ir.program import Program
from autoshard.ir.promote import promote
from autoshard.mesh import Mesh
from autoshard.proof.order import prove_program
from autoshard.proof.types import check_types
from autoshard.source import Source
from autoshard.testing.equivalence import compare_compiled, reference_run
from autoshard.testing.models import tiny_gpt
from autoshard.testing.mutants import FAULTS, Mutant
from autoshard.testing.plans import Layout, plan_text

LAYOUT = Layout(dp=2, pp=2, tp=2, zero=1, microbatches=2)


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


def compiled() -> Program:
    model, batch, loss = built()
    plan = load(Source("p.plan", plan_text("tiny_gpt", LAYOUT))).require()
    return compile_plan(model, plan, batch, loss, captured=captured(), check=False).program


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
    assert caught_by(program) != "", fault.what
