"""`fuse { compile = inductor }`: runs of torch's operators as functions that Inductor makes."""

import shutil

import pytest
import torch

from autoshard.api import lockstep
from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.runtime import inductor
from autoshard.source import Source
from autoshard.testing.models import tiny_mlp

PLAN = """autoshard 1
mesh {{ tp = {tp} }}
batch {{ micro_batch_size = 4 }}
{rules}
fuse {{ compile = {compiler} }}
"""
RULES = "tensor { up: colwise, down: rowwise }"


def trained(compiler, tp=2):
    """Return the record of one step of a tiny model."""
    model, batch, loss = tiny_mlp()
    text = PLAN.format(tp=tp, rules=RULES if tp > 1 else "", compiler=compiler)
    return lockstep(model, text, [batch], loss=loss, dtype=torch.float64)[0]


def same(ours, theirs, tolerance):
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.grads, theirs.grads, rtol=tolerance, atol=tolerance)


def test_a_phase_of_compiled_runs_computes_the_same(monkeypatch):
    made = []

    def stand_in(module, examples):
        made.append(examples)
        return lambda *args: list(module(*args))

    monkeypatch.setattr(inductor, "inductor_compile", stand_in)
    same(trained("inductor"), trained("off"), 0)
    assert len(made) > 1  # before a collective and behind it


def test_what_the_compiler_refuses_runs_as_it_is(monkeypatch):
    def refuse(module, examples):
        raise RuntimeError("no\nthank you")

    monkeypatch.setattr(inductor, "inductor_compile", refuse)
    same(trained("inductor"), trained("off"), 0)
    model, batch, loss = tiny_mlp()
    plan = load(Source("plan", PLAN.format(tp=1, rules="", compiler="inductor"))).require()
    program = compile_plan(model, plan, batch, loss).program
    compiler = inductor.inductor_for(program, torch.device("cpu"))
    compiler.compiled(program.stages[0].phases["F"])
    assert compiler.summary().endswith("0 distinct runs of operators compiled, 1 left plain: no")


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_what_inductor_makes_computes_the_same():
    same(trained("inductor", tp=1), trained("off", tp=1), 1e-12)
