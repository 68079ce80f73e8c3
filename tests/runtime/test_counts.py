"""What a step is said to consist of."""

from autoshard.testing.lockstep import run_ranks
from tests.runtime.toy import Toy


def counts(**layout):
    toy = Toy(**layout)
    return run_ranks(toy.program(), toy.values(), lambda exe: exe.counts)[1]


def test_a_pipeline_rank_sends_or_receives_a_value_for_each_transfer_action():
    first, last = counts(pp=2, m=3)
    assert first["actions"] == last["actions"] == 13  # F, B and a transfer of each, REDUCE_GRAD
    assert first["messages"] == last["messages"] == 6
    assert first["launches"] % 3 == last["launches"] % 3 == 0


def test_ranks_that_reduce_count_their_collectives():
    assert counts(m=2)[0]["collectives"] == 0
    assert counts(dp=2, m=2)[0]["collectives"] > 0
    assert counts(dp=2, zero=3)[0]["collectives"] > counts(dp=2, zero=0)[0]["collectives"]


def test_every_gradient_is_copied_to_its_place_once_a_micro_batch():
    assert counts(m=3)[0]["copies"] == 3 * counts(m=1)[0]["copies"] > 0
