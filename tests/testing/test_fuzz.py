"""Random plans and damaged texts end with our own errors."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.testing import fuzz
from autoshard.testing.fuzz import Findings, check_text, run_plans, run_texts
from autoshard.testing.random_plans import damaged, draw
from autoshard.testing.shrink import shrink


def test_drawn_and_damaged_texts_are_told_with_line_and_column() -> None:
    found = run_texts(2000, seed=11)
    assert found.bad == [] and found.counts.total() == 2000
    assert found.counts["accepted"] > 300


def test_drawn_plans_are_proved_and_equal_in_lock_step() -> None:
    found = run_plans([1, 5], seed=2, in_lock_step=2)
    assert found.bad == [] and found.counts["proved and equal in lock step"] == 2


def test_what_fails_is_made_as_small_as_fails_in_the_same_way() -> None:
    drawn = draw(Random("0 0"))
    found = shrink(drawn, lambda other: "zero" in other.plan and other.layers > 1)
    assert (found.layers, found.dropout, found.heads) == (2, 0.0, 4)
    assert [line.split()[0] for line in found.plan.splitlines()] == ["autoshard", "zero"]


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_damaged_plan_is_told_and_shrinks(rng: Random) -> None:
    findings = Findings()
    check_text(damaged(rng, draw(rng).plan), findings)
    assert findings.bad == []


def test_what_must_not_happen_is_told_with_its_input(monkeypatch) -> None:
    monkeypatch.setattr(fuzz, "_told", lambda source, facts: 1 / 0)
    findings = Findings()
    check_text("autoshard 1", findings)
    (bad,) = findings.bad
    assert "'autoshard 1'" in bad and "ZeroDivisionError" in bad
