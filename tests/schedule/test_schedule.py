"""Schedules as text, as torch's CSV, and by name."""

import pytest

from autoshard.diagnostics import ScheduleError
from autoshard.schedule import SCHEDULES, Schedule, lower_schedule, make_schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_text_and_csv_read_back_equal(name) -> None:
    schedule = make_schedule(name, num_ranks=3, num_microbatches=5)
    for one in (schedule, lower_schedule(schedule, reduce_per="step", unshard="step")):
        assert Schedule.parse(str(one)) == one
        assert Schedule.from_csv(one.to_csv(), name) == one


def test_csv_cells_may_be_empty_or_overlapped_pairs() -> None:
    text = "0F0,0F1,,(0F2;3B0)OVERLAP_F_B,0B0\n1F0,2F0,,2B0,1B0\n"
    rank_0 = "0F0 0F1 0F2 3B0 0B0"
    schedule = Schedule.from_csv(text)
    assert " ".join(map(str, schedule.ranks[0])) == rank_0
    assert (schedule.stage_to_rank, schedule.num_microbatches) == ((0, 1, 1, 0), 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0\n0F0\n", "stage 0 computes on rank 0 and 1"),
        ("0F0\n2F0\n", "no rank computes stage 1 of 3"),
        ("0SEND_F0\n", "at least one compute action"),
        ("hello\n", "'hello' isn't an action"),
    ],
)
def test_a_csv_that_places_no_schedule_is_refused(text, message) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' isn't the head"),
        ("schedule x\nrank 0: 0F0", "isn't the head"),
        ("schedule x microbatches=1 stages=0\nrank 1: 0F0", "must begin with 'rank 0:'"),
    ],
)
def test_a_text_that_is_no_schedule_is_refused(text, message) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.parse(text)


def test_1f1b_follows_each_forward_by_a_backward() -> None:
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=3)
    assert str(schedule) == (
        "schedule 1f1b microbatches=3 stages=0,1\n"
        "rank 0: 0F0 0F1 0B0 0F2 0B1 0B2\n"
        "rank 1: 1F0 1B0 1F1 1B1 1F2 1B2"
    )


def test_an_unknown_schedule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ScheduleError, match=r"no schedule '1b1f'(.|\n)*gpipe, 1f1b"):
        make_schedule("1b1f", num_ranks=2, num_microbatches=2)


def test_wrong_numbers_are_refused_with_numbers_that_work() -> None:
    with pytest.raises(ScheduleError, match="at least 1; got 0"):
        make_schedule("gpipe", num_ranks=2, num_microbatches=0)
    with pytest.raises(ScheduleError, match="gpipe needs virtual_stages 1; got 2"):
        make_schedule("gpipe", num_ranks=2, num_microbatches=2, virtual_stages=2)
