"""The checks of schedules catch every planted fault, and the count can tell when they don't."""

import json

import pytest

from autoshard.schedule import Event, Schedule, lower_schedule, make_schedule
from autoshard.testing import schedule_mutants
from autoshard.testing.event_machine import run_events
from autoshard.testing.schedule_machine import run_symbols


def test_every_fault_is_caught_and_no_good_program_raises_an_alarm(capsys) -> None:
    assert schedule_mutants.main(["--count", "100", "--seed", "3", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["rate"], facts["false_alarms"], facts["good"]) == (1.0, 0, 100)
    assert facts["faults"] + facts["equivalent"] == 200
    assert facts["equivalent"] < 40


def test_a_blind_check_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(schedule_mutants, "find_problems", lambda *args, **options: ())
    report = schedule_mutants.run(40, seed=1)
    assert report.total("missed") > 0


def test_a_blind_proof_is_noticed(monkeypatch) -> None:
    good = schedule_mutants.prove_order([[]])
    monkeypatch.setattr(schedule_mutants, "prove_order", lambda *args, **options: good)
    report = schedule_mutants.run(40, seed=1)
    assert report.total("missed") > 0


def test_a_check_that_is_too_strict_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(schedule_mutants, "find_problems", lambda *args, **options: ("no",))
    report = schedule_mutants.run(10, seed=1)
    assert report.total("false alarm") >= 10


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_schedules_of_one_placement_train_the_same(name) -> None:
    expected = run_symbols(lowered("zb_h2"), is_sharded=True)
    outcome = run_symbols(lowered(name), is_sharded=True)
    assert (outcome.fault, outcome.left_over) == ("", [])
    assert outcome == expected


def lowered(name: str) -> Schedule:
    """Return a small lowered schedule."""
    made = make_schedule(name, num_ranks=3, num_microbatches=4)
    return lower_schedule(made, reduce_per="step", unshard="step")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0F0,0B0\n1F0,1B0\n", "0B0 reads ('grad', 0, 0), which isn't there"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n", "1F0 reads"),
        ("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "0B0 reads ('grad', 0, 0)"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0\n", "rank 0 is stuck at 0RECV_B0"),
    ],
)
def test_the_symbol_machine_stops_at_what_a_rank_lacks(text, fault) -> None:
    assert fault in run_symbols(Schedule.from_csv(text), is_sharded=False).fault


def test_the_event_machine_finds_what_blocks() -> None:
    group = (0, 1)
    x, y = (Event(0, "collective", group, tag) for tag in "xy")
    assert run_events([[x], [x._replace(rank=1)]]) == ""
    assert "meet with ['x', 'y']" in run_events([[x], [y._replace(rank=1)]])
    assert run_events([[x], []]) == "ranks [0] are stuck"
    assert "never started" in run_events([[Event(0, "wait", group, "x")]])
