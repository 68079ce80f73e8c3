"""C1: the bias of a row-parallel layer is added once, behind the sum."""

import pytest
import torch

from autoshard.testing.models import Built, tiny_mlp
from autoshard.testing.mutants import named
from tests.bank.equal import assert_equal, finding

PLAN = """
mesh {{ tp = {tp} }}
batch {{ micro_batch_size = 4 }}
tensor {{ up: colwise, down: rowwise }}
"""


def biased() -> Built:
    """Return an MLP whose biases outweigh all else."""
    model, batch, loss = tiny_mlp(width=32, hidden=128)
    for layer in (model.up, model.down):
        torch.nn.init.constant_(layer.bias, 100.0)
    return model, batch, loss


@pytest.mark.parametrize("tp", [2, 4])
def test_biases_of_a_hundred_are_added_once(tp: int) -> None:
    assert_equal(biased(), PLAN.format(tp=tp))


def test_a_bias_that_every_rank_adds_would_be_seen() -> None:
    assert finding(biased(), PLAN.format(tp=2), named("sum-bias-twice").plant) == "loss"
