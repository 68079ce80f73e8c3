"""Z13: micro-batches of unequal token counts weigh by their tokens, not one each."""

import pytest
import torch

from autoshard.testing.models import Built, tiny_gpt
from autoshard.testing.mutants import named
from tests.bank.equal import assert_equal, finding

PLANS = {
    "four micro-batches": "batch { micro_batch_size = 1, num_microbatches = 4 }\nmesh { dp = 1 }",
    "two ranks of two": "batch { micro_batch_size = 1, num_microbatches = 2 }\nmesh { dp = 2 }",
}


def uneven() -> Built:
    """Return samples of 1, 16, 5 and 10 labels that count."""
    model, batch, loss = tiny_gpt(layers=1, heads=4)
    counts = torch.tensor([1, 16, 5, 10])
    ignored = torch.arange(16) >= counts[:, None]
    return model, {"ids": batch["ids"], "labels": batch["ids"].masked_fill(ignored, -100)}, loss


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_unequal_token_counts_have_the_gradients_of_one_batch(plan: str) -> None:
    assert_equal(uneven(), plan)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_mean_of_micro_batch_means_would_be_seen(plan: str) -> None:
    assert finding(uneven(), plan, named("localize-normalizer").plant) == "loss"
