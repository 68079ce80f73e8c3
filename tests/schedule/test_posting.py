"""Receives are posted ahead of their turn; the order of a rank's transfers stays the schedule's."""

from dataclasses import replace

import pytest

from autoshard.schedule import SCHEDULES, Schedule, lower_schedule, make_schedule, prove_order
from autoshard.schedule.action import COMPUTE, RECVS, Action
from autoshard.schedule.posting import AHEAD, TRANSFERS, posted
from autoshard.schedule.programs import spell_out


def lowered(name: str, ranks: int, count: int) -> Schedule:
    made = make_schedule(name, num_ranks=ranks, num_microbatches=count)
    return lower_schedule(made, reduce_per="step", unshard="step")


def flat(row) -> list[Action]:
    return [action for step in posted(row) for action in step]


def test_the_order_of_transfers_and_of_all_else_is_the_schedule_s(schedules) -> None:
    for row in (row for schedule in schedules for row in schedule.ranks):
        done = flat(row)
        for is_transfer in (True, False):
            mine = [a for a in done if (a.kind in TRANSFERS) == is_transfer]
            assert mine == [a for a in row if (a.kind in TRANSFERS) == is_transfer]


def computed_before(row) -> dict[Action, int]:
    """Return how many compute actions come before each action."""
    found, count = {}, 0
    for action in row:
        found[action] = count
        count += action.kind in COMPUTE
    return found


def test_receives_come_ahead_by_one_computation_and_nothing_else_moves(schedules) -> None:
    for schedule in schedules:
        ahead = []
        for row in schedule.ranks:
            turn, place = computed_before(row), computed_before(flat(row))
            early = {a: turn[a] - place[a] for a in row}
            assert all(0 <= n <= AHEAD for n in early.values())
            assert all(a.kind in RECVS for a, n in early.items() if n)
            ahead += [n for n in early.values() if n]
        assert ahead or schedule.num_microbatches == 1


def test_what_is_posted_admits_a_run_on_ordered_streams(schedules) -> None:
    for schedule in schedules:
        rows = tuple(tuple(flat(row)) for row in schedule.ranks)
        for is_batched in (False, True):
            programs = spell_out(replace(schedule, ranks=rows), is_batched=is_batched)
            assert prove_order(programs, "streams").ok


def test_a_receive_posted_before_a_send_that_its_answer_needs_would_be_seen() -> None:
    rows = [list(row) for row in lowered("1f1b", 2, 1).ranks]
    at = next(i for i, a in enumerate(rows[0]) if a.kind in RECVS)
    rows[0].insert(0, rows[0].pop(at))
    schedule = replace(lowered("1f1b", 2, 1), ranks=tuple(map(tuple, rows)))
    assert prove_order(spell_out(schedule), "streams").reason == "cycle"


def test_only_neighbours_of_the_schedule_share_a_batch() -> None:
    row = [Action.parse(text) for text in ["1RECV_F0", "1F0", "1B0", "1RECV_F1", "1SEND_B0", "1F1"]]
    steps = [[str(action) for action in step] for step in posted(row)]
    assert steps == [["1RECV_F0"], ["1F0"], ["1RECV_F1"], ["1B0"], ["1SEND_B0"], ["1F1"]]


@pytest.fixture(scope="module", params=SCHEDULES)
def schedules(request) -> list[Schedule]:
    return [lowered(request.param, p, m) for p in (2, 3, 4, 8) for m in (1, 2, 5, 8)]
