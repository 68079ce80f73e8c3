"""Real gloo processes: equal to lock step, and stopping together with one message."""

import time
from pathlib import Path

import pytest

from tests.distributed.launch import torchrun

HERE = Path(__file__).parent

pytestmark = pytest.mark.distributed

# Scenario -> what each rank's message must say.
SAID = {
    "other_plan": ("another plan than rank",) * 2,
    "other_program": ("another program than rank",) * 2,
    "tensor_peers_with_other_batches": (
        "rank 1 got another batch than rank 0, but they compute one batch together",
    )
    * 2,
    "one_rank_with_a_short_batch": (
        "RuntimeMismatchError: error: rank 1 can't go on: batch leaf",
        "has 3 samples, the plan needs 4: micro_batch_size 2 x num_microbatches 2",
    ),
    "one_rank_evaluates": (
        "rank 1 is in its forward_backward number 1, rank 0 in its evaluate number 1",
    )
    * 2,
    "one_rank_with_longer_rows": (
        "rank 1 got a batch of other shapes than rank 0: t float64[2, 5], x float64[2, 6] against"
        " t float64[2, 5], x float64[2, 3]",
    )
    * 2,
    "adafactor": ("optimizer 'Adafactor' needs whole tensors",) * 2,
    "a_bad_state_dict_on_rank_0": (
        "missing: 'b.weight' [5, 4]",
        "rank 0 can't go on: the state dict doesn't fit the model: 1 missing",
    ),
}


def test_four_ranks_compute_bit_for_bit_what_lock_step_does(tmp_path):
    job = torchrun(tmp_path, 4, HERE / "toy_worker.py")
    job.require_success()
    assert sorted(job.ranks) == [0, 1, 2, 3]


def test_ranks_that_disagree_all_stop_with_a_message_that_names_them(tmp_path):
    """Case C19 among others: tensor-parallel peers got different batches."""
    job = torchrun(tmp_path, 2, HERE / "engine_worker.py")
    job.require_success()
    for scenario, wanted in SAID.items():
        for rank, text in enumerate(wanted):
            assert text in job.ranks[rank][scenario]


def test_a_rank_that_fails_ends_the_job_with_its_own_message(tmp_path):
    """Case E9."""
    job = torchrun(tmp_path, 2, HERE / "crash_worker.py", timeout=120)
    assert job.returncode != 0
    assert "ValueError: the disk of rank 1 is full" in job.output
    assert time.time() - job.ranks[1]["failed_at"] < 15  # nobody waits for a time-out
