"""Each planted fault is caught without running anything; the sound program raises no alarm."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.placement import Placement
from autoshard.ir.rules import table
from autoshard.ir.rules.call import Call, Choice
from autoshard.plan import Plan
from autoshard.proof.compute_types import check_compute_types
from autoshard.proof.number_types import check_number_types
from autoshard.proof.static import static_rows
from autoshard.proof.types import check_types
from autoshard.proof.verdict import Row, Status, Verdict
from autoshard.source import Source
from autoshard.testing import graph_faults, mutants, runtime_faults, type_faults
from autoshard.testing.faults import Fault
from autoshard.testing.models import tiny_gpt, tiny_hf, token_batch
from autoshard.testing.mutants import FAULTS, QUICK, Result, Subject
from autoshard.testing.plans import Layout, plan_text
from autoshard.verify import ratio_hint, verify

LAYOUT = Layout(dp=2, pp=2, tp=2, zero=1, microbatches=2)
BY_NAME = {fault.name: fault for fault in FAULTS}


@cache
def subject() -> Subject:
    return Subject(QUICK[0])


def built():
    return tiny_gpt(layers=2, batch=LAYOUT.samples, length=8)


def plan(layout: Layout = LAYOUT) -> Plan:
    return load(Source("p.plan", plan_text("tiny_gpt", layout))).require()


def test_the_sound_program_is_proved_by_all_static_links() -> None:
    assert subject().unproven() == []


IN_DOUBLE = [fault for fault in FAULTS if fault not in type_faults.FAULTS]


@pytest.mark.parametrize("fault", IN_DOUBLE, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught_before_anything_runs(fault: Fault) -> None:
    if not fault.count(subject().program):
        pytest.skip("no place in this program; the script plants it in another one")
    broken = subject().program.fork()
    fault.plant(broken)
    assert subject().caught_by(broken, numbers=False), fault.what


def test_a_planted_fault_does_not_reach_the_program_it_was_copied_from() -> None:
    broken = subject().program.fork()
    assert BY_NAME["drop-layer"].plant(broken) and not BY_NAME["drop-layer"].plant(broken, 99)
    assert subject().caught_by(subject().program, numbers=False) == ""


@pytest.mark.parametrize("name", ["overwrite-gradient", "take-first-microbatch"])
def test_numbers_see_what_only_the_run_time_does_wrong(name: str) -> None:
    assert not subject().differs(subject().program)
    fault = runtime_faults.FAULTS[name]
    assert subject().caught_by(subject().program, fault()) == "numbers"


@pytest.mark.parametrize(
    ("name", "times"), [("clip-one-rank", "0 times"), ("count-replicas", "2 times")]
)
def test_a_norm_that_misses_or_repeats_a_part_is_seen_before_anything_runs(
    name: str, times: str
) -> None:
    with runtime_faults.FAULTS[name]():
        row = static_rows(subject().program, subject().plain)[0]
    assert row.status is Status.WRONG
    assert row.findings[0].startswith("the norm counts piece ") and times in row.findings[0]


def test_the_table_counts_what_was_missed() -> None:
    results = [
        Result("a", "x", 0, "types"),
        Result("a", "x", 1, ""),
        Result("a", "y", 0, "numbers"),
    ]
    found = mutants.facts(results, ["alarm"])
    figures = [found[k] for k in ("mutants", "caught", "caught_statically", "false_alarms")]
    assert figures == [3, 2, 1, 1]
    assert "missed: x at place 1 of a" in mutants.table(results, [])


def test_a_micro_batch_of_one_sample_raises_no_alarm() -> None:
    one = replace(LAYOUT, micro_batch_size=1)
    model, batch, loss = tiny_gpt(layers=2, batch=one.samples, length=8)
    found = check_types(compile_plan(model, plan(one), batch, loss, check=False).program)
    assert found.wrong == [] and found.unproven == {} and found.unknown == {}


def test_verify_says_which_link_is_wrong_and_where() -> None:
    model, batch, loss = built()
    fault = BY_NAME["wrong-axis"]
    verdict = verify(model, plan(), batch, loss, numbers=False, mutate=fault.plant)
    assert not verdict.is_good and str(verdict).endswith("WRONG: do not run this plan")
    (finding, *_) = verdict.row("types").findings
    assert finding.startswith("stage 0, F, tp: ")


def test_verify_breaks_what_it_runs_too() -> None:
    model, batch, loss = built()
    fault = Fault("x", "", graph_faults.localize_normalizer)
    verdict = verify(model, plan(), batch, loss, steps=1, mutate=fault.plant)
    assert verdict.row("types").status is Status.PROVED
    assert verdict.row("erasure").status is Status.WRONG
    (finding,) = verdict.row("numbers").findings
    assert finding.startswith("first difference: loss, step 0")


def test_verify_trains_with_dropout_on_both_sides() -> None:
    one = Layout(pp=2, microbatches=2)
    model, batch, loss = tiny_gpt(layers=2, batch=one.samples, length=8, dropout=0.2)
    verdict = verify(model, plan(one), batch, loss, steps=2)
    assert verdict.is_complete, str(verdict)
    assert str(verdict).endswith("equal to the plain model")


def test_a_capture_that_was_not_compared_is_not_called_equal() -> None:
    with torch.device("meta"):
        model, _, loss = tiny_gpt(layers=2, length=8)
    verdict = verify(model, plan(), token_batch(LAYOUT.samples, 8), loss, numbers=False)
    assert verdict.row("capture").status is Status.SKIPPED
    assert "meta device" in verdict.row("capture").summary
    assert verdict.is_good and not verdict.is_complete
    assert verdict.conclusion == "nothing wrong; not shown: capture, code generation, optimizer"


def test_a_verdict_is_complete_only_when_every_link_was_shown() -> None:
    rows = (Row("types", Status.PROVED, ""), Row("erasure", Status.UNPROVEN, ""))
    assert Verdict(rows).is_good and not Verdict(rows).is_complete
    assert Verdict(rows[:1]).is_complete


def test_a_wrong_factor_is_named_by_the_axis_it_looks_like() -> None:
    program = subject().program
    assert ratio_hint(0.5, program) == ": a factor 1 / tp" and ratio_hint(1.7, program) == ""


# Faults that the programs above have no place for, and the cell that has.
ELSEWHERE = (
    ("draw-another-part", 9),
    ("share-mask", 9),
    ("gather-own-part", 9),
    ("lose-head-sum", 10),
    ("sum-heads-twice", 10),
    *((fault.name, 3) for fault in type_faults.FAULTS),
)


@cache
def subject_of(cell: int) -> Subject:
    return Subject(mutants.CELLS[cell])


@pytest.mark.parametrize(("name", "cell"), ELSEWHERE)
def test_faults_of_masks_of_kept_heads_and_of_number_types_are_types(name: str, cell: int) -> None:
    broken = subject_of(cell).program.fork()
    assert BY_NAME[name].plant(broken)
    assert subject_of(cell).caught_by(broken, numbers=False)


def test_a_mixed_precision_program_is_proved_and_a_wrong_type_is_seen_everywhere() -> None:
    mixed = subject_of(3)
    assert mixed.program.precision is not None and mixed.unproven() == []
    for fault in type_faults.FAULTS:
        for place in range(0, fault.count(mixed.program), 3):
            broken = mixed.program.fork()
            fault.plant(broken, place)
            wrong = [*check_number_types(broken), *check_compute_types(broken)]
            assert wrong, f"{fault.name} at place {place}"


def test_attention_that_torch_spells_out_itself_is_no_wrong_type() -> None:
    """T5's bias has a gradient: no kernel takes it, and torch widens what it multiplies."""
    text = (
        "autoshard 1\nmesh { dp = 2 }\nbatch { micro_batch_size = 2 }\nprecision { compute = bf16 }"
    )
    model, batch, loss = tiny_hf("t5", layers=1)
    program = compile_plan(model, load(Source("p", text)).require(), batch, loss).program
    assert [*check_compute_types(program)] == []


def test_shapes_that_no_rule_takes_are_told_not_a_traceback(monkeypatch) -> None:
    def rule(call: Call, ins: tuple[Placement, ...]) -> Choice:
        raise RuntimeError("shapes [2] and [3] can't be broadcast")

    made = subject()
    monkeypatch.setitem(table.RULES, torch.ops.aten.add.Tensor, rule)
    row = static_rows(made.program, made.plain)[0]
    assert row.status is Status.WRONG
    assert "operands of these shapes: shapes [2] and [3]" in "".join(row.findings)
