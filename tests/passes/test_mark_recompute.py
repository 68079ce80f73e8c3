"""Recomputation keeps less and changes no bit, dropout included (case Z9)."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.fx import Node

from autoshard.cost.traffic import traffic
from autoshard.diagnostics import Remark
from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.batch import share_leaves
from autoshard.ir.buckets import gathers_of
from autoshard.ir.capture import capture
from autoshard.ir.node_info import info, val
from autoshard.ir.program import Program
from autoshard.mesh import Mesh
from autoshard.ops.dropout import DropoutArgs, dropout
from autoshard.proof.verdict import Status
from autoshard.source import Source
from autoshard.testing.equivalence import held_values
from autoshard.testing.lockstep import StepRecord, run_lockstep
from autoshard.testing.models import tiny_gpt
from autoshard.testing.plans import Layout, plan_text
from autoshard.verify import verify

LAYOUTS = {
    "zero3": Layout(dp=2, zero=3),
    "tp": Layout(tp=2, microbatches=2),
    "pp": Layout(pp=2, microbatches=2),
}
RULES = {
    "none": "h.*: none",
    "full": "h.*: full",
    "half": "h.0: full",
    "nested": "h.*: full, h.*.mlp: none",
    "selective": "h.*: selective(save=[attention])",
    "products": "h.*: selective(save=[matmul, attention])",
}
HALF_BUDGET = "recompute { budget = 75% }"


@cache
def built():
    return tiny_gpt(layers=2, width=16, heads=2, batch=4, length=8, dropout=0.5)


@cache
def captured() -> Program:
    model, batch, loss = built()
    part = {name: value[:2] for name, value in batch.items()}
    return capture(model, part, loss, mesh=Mesh(()), compare=False)


@cache
def compiled(layout: str, extra: str = "") -> tuple[Program, tuple[Remark, ...]]:
    model, batch, loss = built()
    text = plan_text("tiny_gpt", LAYOUTS[layout], f"{extra}\n")
    plan = load(Source("p.plan", text)).require()
    made = compile_plan(model, plan, batch, loss, captured=captured())
    return made.program, made.remarks


def rules(name: str) -> str:
    return f"recompute {{ {RULES[name]} }}"


def train(program: Program) -> StepRecord:
    model, batch, _ = built()
    values = held_values(model, program, None)
    shares = share_leaves(batch, program.mesh.size("dp"))
    return run_lockstep(program, values, [shares], seed=3)[0]


@cache
def kept_everything(layout: str) -> StepRecord:
    return train(compiled(layout)[0])


def kept_bytes(program: Program) -> int:
    kept = program.stages[0].phases["F"].named_results("saved").values()
    return sum(val(node).numel() * val(node).element_size() for node in kept)


def repeated(program: Program, stage: int = 0) -> list[Node]:
    nodes = program.stages[stage].phases["I"].graph.nodes
    return [node for node in nodes if info(node).role == "recomputed"]


CELLS = [("zero3", name) for name in RULES] + [("tp", "full"), ("pp", "full"), ("pp", "selective")]


@pytest.mark.parametrize(("layout", "name"), CELLS)
def test_gradients_are_equal_bit_for_bit_with_and_without(layout: str, name: str) -> None:
    program, _ = compiled(layout, rules(name))
    assert bool(repeated(program)) == (name != "none")
    ours, plain = train(program), kept_everything(layout)
    assert torch.equal(ours.loss, plain.loss)
    assert ours.grads.keys() == plain.grads.keys()
    for fqn, value in plain.grads.items():
        assert torch.equal(ours.grads[fqn], value), fqn


def test_another_mask_in_backward_would_be_seen() -> None:
    model, batch, loss = built()
    plan = load(Source("p.plan", plan_text("tiny_gpt", LAYOUTS["pp"], rules("full") + "\n")))
    program = compile_plan(model, plan.require(), batch, loss, captured=captured()).program
    (mask, *_) = [n for n in repeated(program) if n.target is dropout]
    args = DropoutArgs(*mask.args)
    mask.args = tuple(args._replace(site=args.site + 100))
    ours, plain = train(program), kept_everything("pp")
    assert any(not torch.equal(ours.grads[fqn], value) for fqn, value in plain.grads.items())


def test_full_keeps_least_and_each_milder_rule_more() -> None:
    sizes = [kept_bytes(compiled("zero3", rules(n))[0]) for n in ("full", "selective", "products")]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[1] < kept_bytes(compiled("zero3")[0])
    half = kept_bytes(compiled("zero3", rules("half"))[0])
    assert sizes[0] < half < kept_bytes(compiled("zero3")[0])


def test_each_bucket_is_still_gathered_once_in_backward() -> None:
    plain, ours = compiled("zero3")[0], compiled("zero3", rules("full"))[0]
    names = [list(gathers_of(p.stages[0].phases["I"])) for p in (plain, ours)]
    assert sorted(names[0]) == sorted(names[1])


def test_collectives_that_run_again_are_counted() -> None:
    counts = [
        sum(row.calls for row in traffic(program) if row.kind == "all_reduce" and row.axis == "tp")
        for program in (compiled("tp")[0], compiled("tp", rules("full"))[0])
    ]
    again = [n for n in repeated(compiled("tp", rules("full"))[0]) if "all_reduce" in str(n.target)]
    assert again
    assert counts[1] == counts[0] + 2 * len(again)  # two micro-batches


def test_a_budget_chooses_and_says_what() -> None:
    program, remarks = compiled("zero3", HALF_BUDGET)
    (chosen,) = [r.message for r in remarks if "budget" in r.message]
    assert "1 of 2 run again (h." in chosen
    assert chosen.endswith("fits")
    assert len({info(node).path.split(".")[1] for node in repeated(program)}) == 1
    (small,) = [
        r.message
        for r in compiled("zero3", "recompute { budget = 1KiB }")[1]
        if "budget" in r.message
    ]
    assert "2 of 2" in small
    assert small.endswith("does not fit")
    program, _ = compiled("zero3", "recompute { budget = 1GB }")
    assert not repeated(program)


def test_what_runs_again_is_erased_from_the_proof() -> None:
    model, batch, loss = tiny_gpt(layers=1, width=16, heads=2, batch=4, length=8)
    plan = load(Source("p.plan", plan_text("tiny_gpt", LAYOUTS["tp"], rules("full") + "\n")))
    verdict = verify(model, plan.require(), batch, loss, numbers=False)
    row = {r.link: r for r in verdict.rows}["erasure"]
    assert row.status is Status.PROVED, row
