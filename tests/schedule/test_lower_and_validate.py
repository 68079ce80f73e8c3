"""Lowering adds what is needed, and validation misses nothing that is broken by hand."""

import dataclasses

import pytest

from autoshard.diagnostics import ScheduleError
from autoshard.schedule import (
    SCHEDULES,
    Action,
    Costs,
    Kind,
    Schedule,
    find_problems,
    lower_schedule,
    make_schedule,
    validate_schedule,
)

REDUCE = ("step", "microbatch")
UNSHARD = ("never", "step", "microbatch")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_schedule_is_valid_for_any_number_of_microbatches(name, num_ranks) -> None:
    for num_microbatches in range(1, 10):
        made = make_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
        assert find_problems(made) == ()
        for reduce_per, unshard in [(r, u) for r in REDUCE for u in UNSHARD]:
            lowered = lower_schedule(made, reduce_per=reduce_per, unshard=unshard)
            assert find_problems(lowered, reduce_per=reduce_per, unshard=unshard) == ()


def test_lowering_1f1b_adds_transfers_gathers_and_reductions() -> None:
    made = make_schedule("1f1b", num_ranks=2, num_microbatches=2)
    assert str(lower_schedule(made, reduce_per="step", unshard="step")).splitlines()[1:] == [
        "rank 0: 0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0RESHARD "
        "0REDUCE_GRAD",
        "rank 1: 1UNSHARD 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1RESHARD "
        "1REDUCE_GRAD",
    ]


def test_gathers_and_reductions_per_microbatch_are_left_to_the_graphs() -> None:
    made = make_schedule("1f1b", num_ranks=2, num_microbatches=2)
    lowered = lower_schedule(made, reduce_per="microbatch", unshard="microbatch")
    assert "SHARD" not in str(lowered) and "REDUCE" not in str(lowered)


def test_stages_that_are_neighbours_on_one_rank_need_no_transfer() -> None:
    text = "0F0,1F0,1B0,0B0\n2F0,2B0\n"
    lowered = lower_schedule(Schedule.from_csv(text), reduce_per="microbatch", unshard="never")
    assert str(lowered).splitlines()[1] == "rank 0: 0F0 1F0 1SEND_F0 1RECV_B0 1B0 0B0"


def test_lowering_twice_is_refused() -> None:
    lowered = lower_schedule(
        make_schedule("gpipe", num_ranks=2, num_microbatches=2), reduce_per="step", unshard="step"
    )
    with pytest.raises(ScheduleError, match="only once"):
        lower_schedule(lowered, reduce_per="step", unshard="step")


def test_costs_without_time_are_refused_in_lowering() -> None:
    made = make_schedule("gpipe", num_ranks=2, num_microbatches=2)
    with pytest.raises(ScheduleError, match="0F0 takes no time"):
        lower_schedule(made, reduce_per="step", unshard="step", costs=Costs(F=0))


def test_actions_that_wait_in_a_circle_are_refused_with_ranks_and_actions() -> None:
    schedule = Schedule.from_csv("0B0,0F0\n1F0,1B0\n")
    with pytest.raises(ScheduleError, match="rank 0 at 0B0 waits for 0F0"):
        lower_schedule(schedule, reduce_per="step", unshard="never")


GOOD = lower_schedule(
    make_schedule("1f1b", num_ranks=3, num_microbatches=3), reduce_per="step", unshard="step"
)
LOWERED = {"reduce_per": "step", "unshard": "step"}
SPLIT = Schedule.from_csv("0F0,0I0,0W0,0F1,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n")


def broken(rank, old, new, schedule=GOOD):
    """Return the schedule with text replaced in one rank's line."""
    line = " ".join(map(str, schedule.ranks[rank]))
    assert f" {old} " in f" {line} "
    words = f" {line} ".replace(f" {old} ", f" {new} ").split()
    rows = list(schedule.ranks)
    rows[rank] = tuple(Action.parse(word) for word in words)
    return dataclasses.replace(schedule, ranks=tuple(rows))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (broken(0, "0F0", "0F1"), "stage 0 has 0F0 0 times, not once"),
        (broken(0, "0B1", ""), "needs B once or I and W once; it has B 0, I 0, W 0 times"),
        (broken(1, "1F1", "4F1"), "4F1 names stage 4 of 3"),
        (broken(1, "1F1", "2F1"), "2F1 belongs to rank 2, which holds the stage"),
        (broken(1, "1F1", "1F7"), "1F7 names micro-batch 7 of 3"),
        (broken(1, "1SEND_F1", ""), "1SEND_F1 is there 0 times, but is needed 1 times"),
        (broken(1, "1RECV_F1", "1RECV_F1 1RECV_F1"), "1RECV_F1 is there 2 times"),
        (broken(0, "0F0 0SEND_F0", "0SEND_F0 0F0"), "0SEND_F0 comes before 0F0, whose result"),
        (broken(0, "0RECV_B2 0B2", "0B2 0RECV_B2"), "0RECV_B2 comes after 0B2, which reads it"),
        (broken(2, "2REDUCE_GRAD", ""), "stage 2 needs REDUCE_GRAD 1 times, not 0"),
        (broken(2, "2B2", "2REDUCE_GRAD 2B2"), "stage 2 needs REDUCE_GRAD 1 times, not 2"),
        (broken(2, "2UNSHARD 2RECV_F0 2F0", "2RECV_F0 2F0 2UNSHARD"), "after the first use"),
        (broken(2, "2RESHARD", ""), "needs UNSHARD and RESHARD 1 times; it has 1 and 0"),
        (broken(1, "1I0 1W0", "1W0 1I0", SPLIT), "1W0 comes before 1I0"),
        (broken(1, "1F0 1I0", "1I0 1F0", SPLIT), "1I0 comes before 1F0"),
        (broken(1, "1W0 1F1 1I1 1W1", "1F1 1I1 1W1 1W0", SPLIT), "after micro-batch 1; the order"),
    ],
)
def test_a_schedule_broken_by_hand_is_refused_with_the_place(schedule, message) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate_schedule(schedule, **(LOWERED if schedule.is_lowered() else {}))


def test_a_reduction_before_the_last_weight_gradient_is_refused() -> None:
    early = broken(2, "2REDUCE_GRAD", "")
    early = broken(2, "2B2", "2REDUCE_GRAD 2B2", early)
    assert any("before the stage's last weight gradient" in p for p in find_problems(early))


def test_a_local_neighbour_must_come_first() -> None:
    schedule = Schedule.from_csv("1F0,0F0,1B0,0B0\n")
    assert find_problems(schedule) == ("rank 0: 1F0 comes before the F of stage 0 it reads",)


def test_any_accumulation_order_is_allowed_on_request() -> None:
    reordered = broken(1, "1W0 1F1 1I1 1W1", "1F1 1I1 1W1 1W0", SPLIT)
    assert find_problems(reordered, accumulation="any") == ()


def test_a_missing_reduction_is_seen_when_the_lowering_is_known() -> None:
    only_stage = Schedule.from_csv("0F0,0B0\n")
    assert find_problems(only_stage) == ()
    assert "REDUCE_GRAD 1 times" in find_problems(only_stage, reduce_per="step")[0]


def test_a_stage_may_lack_storage_actions_when_the_lowering_is_not_known() -> None:
    without = broken(2, "2REDUCE_GRAD", "")
    without = broken(2, "2RESHARD", "", broken(2, "2UNSHARD", "", without))
    assert find_problems(without) == ()
    assert len(find_problems(without, reduce_per="step", unshard="step")) == 2
    half = broken(2, "2RESHARD", "")
    assert "0 or 1 times; it has 1 and 0" in find_problems(half)[0]


def test_forwards_alone_are_valid_for_evaluation_only() -> None:
    rows = tuple(
        tuple(a for a in row if a.kind in (Kind.F, Kind.SEND_F, Kind.RECV_F)) for row in GOOD.ranks
    )
    forward = dataclasses.replace(GOOD, ranks=rows)
    assert find_problems(forward, is_training=False) == ()
    assert "needs B once or I and W once" in find_problems(forward)[0]
    assert "needs no backward" in find_problems(GOOD, is_training=False)[0]
