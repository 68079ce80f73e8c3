"""Erasure where a weight is tied over stages of one rank, and over stages of several."""

import pytest

from autoshard.frontend import compile_plan
from autoshard.proof.static import static_rows
from autoshard.proof.verdict import Status
from autoshard.testing.models import tiny_gpt
from autoshard.testing.mutants import named
from tests.bank.equal import read

PLAN = """
mesh {{ pp = 2, dp = 2 }}
batch {{ micro_batch_size = 1, num_microbatches = 2 }}
pipeline {{ split = even(h.*), schedule = {schedule}, virtual_stages = 2 }}
zero {{ stage = {zero}, param_persistence_threshold = 0KiB }}
"""


def rows(schedule: str, zero: int, mutate=None):
    """Return the static rows of a four-stage GPT whose embedding is its head."""
    model, batch, loss = tiny_gpt(layers=4, width=8, heads=2, vocab=12, length=4, batch=4)
    made = compile_plan(model, read(PLAN.format(schedule=schedule, zero=zero)), batch, loss)
    if mutate is not None:
        assert mutate(made.program)
    return static_rows(made.program, made.plain)


@pytest.mark.parametrize(("schedule", "zero"), [("zbv", 3), ("interleaved_1f1b", 2)])
def test_both_uses_are_in_the_gradient(schedule: str, zero: int) -> None:
    assert [row.status for row in rows(schedule, zero)] == [Status.PROVED] * 3


def test_a_lost_use_is_seen() -> None:
    erasure = rows("interleaved_1f1b", 1, named("lose-tied-gradient").plant)[1]
    assert erasure.status is Status.WRONG and "wte.weight" in erasure.findings[0]
