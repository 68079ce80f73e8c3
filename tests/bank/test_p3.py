"""P3: rounds of accumulation before one step add up to one big batch."""

import pytest
import torch

from autoshard.frontend import compile_plan
from autoshard.testing.equivalence import TOLERANCE, differences, held_values
from autoshard.testing.lockstep import StepRecord, run_lockstep
from autoshard.testing.models import Built, tiny_gpt
from tests.bank.equal import read, train_plain

PLAN = """
mesh { pp = 2 }
batch { micro_batch_size = 1, num_microbatches = 4 }
pipeline { split = before(h.1) }
"""
NO_CLIP = 1e9


def big_batch() -> Built:
    """Return 12 samples in which every label counts, so that equal rounds weigh the same."""
    model, batch, loss = tiny_gpt(layers=2, heads=4, batch=12)
    return model, {"ids": batch["ids"], "labels": batch["ids"].roll(-1, 1)}, loss


def accumulate(built: Built, weight: float) -> StepRecord:
    """Return the gradients and their norm after three rounds of four samples each."""
    model, batch, loss = built
    rounds = [{n: v[i : i + 4] for n, v in batch.items()} for i in (0, 4, 8)]
    program = compile_plan(model, read(PLAN), rounds[0], loss, dtype=torch.float64).program
    records = run_lockstep(
        program,
        held_values(model, program, torch.float64),
        [[leaves] for leaves in rounds],
        optimizer=None,
        max_norm=NO_CLIP,
        weights=[weight] * 3,
    )
    return records[-1]


@pytest.fixture(scope="module")
def plain() -> StepRecord:
    return train_plain(*big_batch(), steps=1, max_norm=NO_CLIP)[0]


def worst(ours: StepRecord, plain: StepRecord) -> tuple[str, float]:
    """Return the largest difference of gradients and norm; a round has a loss of its own."""
    found = [d for d in differences([ours], [plain]) if d.what.split()[0] in ("grad", "norm")]
    largest = max(found, key=lambda d: d.error)
    return largest.what, largest.error


def test_three_rounds_of_a_third_have_the_gradients_and_norm_of_one_big_batch(plain) -> None:
    what, error = worst(accumulate(big_batch(), 1 / 3), plain)
    assert error <= TOLERANCE, what


def test_rounds_that_are_not_weighted_would_be_seen(plain) -> None:
    ours = accumulate(big_batch(), 1.0)
    assert worst(ours, plain)[1] > 1
    assert torch.isclose(ours.norm, 3 * plain.norm, rtol=TOLERANCE)
