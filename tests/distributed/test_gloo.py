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


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return what both ranks of the compiling scenarios said, by scenario."""
    job = torchrun(tmp_path_factory.mktemp("compile"), 2, HERE / "compile_worker.py")
    job.require_success()
    return {name: (job.ranks[0][name], job.ranks[1][name]) for name in job.ranks[0]}


def _starts(lines, word):
    return [line.split(None, 1)[1] for line in lines if line.startswith(word)]


def test_one_rank_compiles_and_the_others_receive_the_program(compiled):
    zero, one = compiled["first_run"]
    assert (zero["compiles"], one["compiles"]) == (2, 0)  # for training and for evaluation
    assert zero["numbers"] == one["numbers"]
    assert _starts(zero["lines"], "cache") == _starts(one["lines"], "cache")
    assert _starts(zero["lines"], "cache")[0].startswith("miss: compiled in")
    assert _starts(one["lines"], "types")[0].startswith("proved")
    assert "from rank 0, which found or compiled it for all" in _starts(one["lines"], "program")


def test_what_is_in_the_cache_no_rank_compiles(compiled):
    for rank, said in enumerate(compiled["second_run"]):
        assert said["compiles"] == 0
        assert said["numbers"] == compiled["first_run"][rank]["numbers"]
        assert _starts(said["lines"], "cache")[0].startswith("hit: compiled in")


@pytest.mark.parametrize(
    "scenario, why",
    [
        ("other_comment_on_one_rank", "not used (ranks have different keys)"),
        ("no_saved_form", "not used (rank 0's has no saved form)"),
    ],
)
def test_where_nothing_can_be_shared_each_rank_compiles(compiled, scenario, why):
    zero, one = compiled[scenario]
    assert (zero["compiles"], one["compiles"]) == (1, 1)
    assert zero["numbers"] == one["numbers"]
    assert _starts(one["lines"], "cache")[0].startswith(why)


def test_ranks_with_unlike_models_are_still_told_apart(compiled):
    for scenario in ("other_model_on_one_rank", "hidden_difference"):
        assert all("another program than rank" in text for text in compiled[scenario]), scenario


def test_what_fails_on_the_compiling_rank_stops_every_rank_in_the_same_words(compiled):
    zero, one = compiled["refused_by_a_pass"]
    assert zero.startswith("PlacementError: error")
    assert one == f"{zero}\n  = note: raised on rank 0, which compiles for all ranks"
    zero, one = compiled["compiler_fails_on_rank_0"]
    assert "no space left" in zero
    assert one.startswith("RuntimeMismatchError: error: rank 0 can't go on: OSError: no space left")


def test_each_rank_captures_and_one_that_is_refused_stops_all(compiled):
    refused = "CaptureError: error[AS701]: what the model does depends on"
    assert all(text.startswith(refused) for text in compiled["refused_model"])
    zero, one = compiled["refused_on_one_rank"]
    assert "rank 1 can't go on: what the model does depends on" in zero
    assert one.startswith(refused)


def test_a_rank_that_can_not_read_what_it_was_sent_stops_all(compiled):
    zero, one = compiled["unreadable_on_rank_1"]
    assert "rank 1 can't go on: these bytes are no saved program" in zero
    assert one.startswith("SaveError: error: these bytes are no saved program")
