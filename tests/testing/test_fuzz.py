"""Random plans and damaged texts end with our own errors."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.testing import fuzz
from autoshard.testing.fuzz import Findings, check_text, run_texts
from autoshard.testing.random_plans import damaged, draw


def test_drawn_and_damaged_texts_are_told_with_line_and_column() -> None:
    found = run_texts(200, seed=11)
    assert found.bad == [] and found.counts.total() == 200
    assert found.counts["accepted"] > 30


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
