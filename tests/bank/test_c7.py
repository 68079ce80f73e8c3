"""C7: the clip norm is that of the whole model, over stages and tensor parallel ranks."""

import pytest

from autoshard.diagnostics import VerifyError
from autoshard.testing import runtime_faults
from autoshard.testing.equivalence import TOLERANCE
from autoshard.testing.models import Built, tiny_gpt
from autoshard.testing.plans import Layout, plan_text
from tests.bank.equal import assert_equal, compare

SAMPLES = 4


def built() -> Built:
    return tiny_gpt(layers=2, batch=SAMPLES, length=8)


def plan(microbatches: int) -> str:
    size = SAMPLES // microbatches
    layout = Layout(pp=2, tp=2, microbatches=microbatches, micro_batch_size=size)
    return plan_text("tiny_gpt", layout).removeprefix("autoshard 1\n")


@pytest.mark.parametrize("microbatches", (1, 4))
def test_the_norm_is_that_of_one_process(microbatches: int) -> None:
    found = assert_equal(built(), plan(microbatches))
    assert all(record.norm > 1 for record in found.ours)  # clipping had something to do


def test_counting_copies_would_be_seen() -> None:
    with runtime_faults.FAULTS["count-replicas"]():
        found = compare(built(), plan(1), steps=1)
    assert next(d.what for d in found.differences if d.error > TOLERANCE) == "norm"


def test_a_norm_of_one_rank_would_be_seen() -> None:
    fault = runtime_faults.FAULTS["clip-one-rank"]()
    with fault, pytest.raises(VerifyError, match="hold different gradient norm"):
        compare(built(), plan(1), steps=1)
