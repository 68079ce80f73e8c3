"""Schedules of other systems are checked alone."""

import pytest

from autoshard.schedule import SCHEDULES, Schedule, lower_schedule, make_schedule
from autoshard.schedule.check import check_schedule
from tests.schedule.test_order import CROSSED, SENDS_FIRST


@pytest.mark.parametrize("text", [SENDS_FIRST, CROSSED])
def test_a_reported_deadlock_is_shown_with_its_ranks(text) -> None:
    check = check_schedule(Schedule.from_csv(text, "reported"))
    assert not check.is_good
    assert "deadlock under rendezvous: ranks 0 and 1 wait for each other" in str(check)
    assert "deadlock under streams: ranks 0 and 1 wait for each other" in str(check)


def test_a_schedule_that_needs_batches_is_told_so() -> None:
    text = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n" + (
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    check = check_schedule(Schedule.from_csv(text))
    assert not check.is_good
    assert "note: it runs only with neighbouring transfers posted together" in str(check)


@pytest.mark.parametrize("name", SCHEDULES)
def test_our_schedules_pass_with_and_without_their_transfers(name) -> None:
    made = make_schedule(name, num_ranks=4, num_microbatches=8)
    check = check_schedule(made)
    assert check.is_good and "our lowering adds" in str(check)
    lowered = lower_schedule(made, reduce_per="step", unshard="step")
    assert check_schedule(lowered).is_good and "note" not in str(check_schedule(lowered))


def test_broken_rules_come_before_the_question_of_order() -> None:
    check = check_schedule(Schedule.from_csv("0F0,0B0,0B0\n1F0,1B0\n"))
    assert not check.is_good and not check.verdicts
    assert "needs B once or I and W once" in str(check)


def test_weight_gradients_out_of_order_are_noted() -> None:
    check = check_schedule(Schedule.from_csv("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n"))
    assert check.is_good and "out of micro-batch order" in str(check)


TORCH = [
    ("Interleaved1F1B", 2), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2), ("DualPipeV", 2),
    ("LoopedBFS", 2), ("LoopedBFS", 3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "virtual"), TORCH)
def test_schedules_as_torch_lowers_them_raise_no_alarm(name, virtual) -> None:
    torch = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    for num_ranks, num_microbatches in ((2, 4), (4, 8)):
        rows = torch.get_schedule_ops(
            name, num_ranks, num_microbatches, num_stages_per_rank=virtual, with_comms=True
        )
        cells = [[str(action or "") for action in row] for row in rows]
        schedule = Schedule.from_csv("\n".join(map(",".join, cells)), name)
        assert schedule.is_lowered()
        assert check_schedule(schedule).is_good
