"""The simulator gives the published formulas exactly."""

import json
from fractions import Fraction
from itertools import pairwise

import pytest

from autoshard.diagnostics import ScheduleError
from autoshard.schedule import SCHEDULES, Costs, Schedule, make_schedule
from autoshard.schedule.costs import parse_costs
from autoshard.schedule.render import chrome_trace, render_grid
from autoshard.schedule.simulate import Simulation, simulate

SIZES = [(2, 3), (4, 8), (8, 32), (5, 9)]


def run(name: str, num_ranks: int, num_microbatches: int, costs: Costs | None = None) -> Simulation:
    """Return the simulation of a schedule."""
    costs = costs or Costs()
    made = make_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches, costs=costs)
    return simulate(made, costs)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("costs", [Costs(1, 1, 1), Costs(1, Fraction(1, 2), Fraction(1, 2))])
def test_gpipe_and_1f1b_have_the_textbook_bubble(name, p, m, costs) -> None:
    assert run(name, p, m, costs).step_bubble == Fraction(p - 1, m + p - 1)


def test_the_bubble_of_8_stages_and_32_microbatches_is_not_below_10_percent() -> None:
    assert f"{float(run('1f1b', 8, 32).step_bubble):.1%}" == "17.9%"


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_1f1b_holds_as_many_microbatches_as_there_are_ranks_to_come(p) -> None:
    assert run("1f1b", p, 12).peak_in_flight() == tuple(range(p, 0, -1))
    assert run("gpipe", p, 12).peak_in_flight() == (12,) * p


def test_both_bubbles_differ_when_ranks_may_begin_the_next_step_early() -> None:
    text = "0F0,0B0\n1F0,1B0\n"
    simulation = simulate(Schedule.from_csv(text), Costs(1, 1, 1))
    assert simulation.step_time == 6 and simulation.spans == (6, 3)
    assert simulation.step_bubble == simulation.span_bubble == Fraction(1, 2)
    text = "0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1F2,1I2,1W0,1W1,1W2\n"
    parallelogram = simulate(Schedule.from_csv(text))
    assert (parallelogram.step_bubble, parallelogram.span_bubble) == (Fraction(1, 10), 0)


def test_activations_are_counted_to_the_weight_or_to_the_input_gradient() -> None:
    simulation = simulate(Schedule.from_csv("0F0,0I0,0F1,0I1,0W0,0W1"))
    assert simulation.peak_in_flight() == (2,)
    assert simulation.peak_in_flight(kept=0) == (1,)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_critical_path_is_a_chain_without_gaps_as_long_as_the_step(name) -> None:
    costs = Costs(2, 3, 1, Fraction(1, 4))
    simulation = run(name, 4, 6, costs)
    path = simulation.critical_path()
    assert path[0].start == 0 and path[-1].end == simulation.step_time
    for before, after in pairwise(path):
        assert after.start - before.end in (0, costs.send)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_rank_does_two_things_at_once_and_all_inputs_are_there(name) -> None:
    simulation = run(name, 3, 7, Costs(2, 3, 1, 1))
    done = {str(t.action): t for row in simulation.ranks for t in row}
    assert len(done) == sum(len(row) for row in simulation.schedule.ranks)
    for row in simulation.ranks:
        assert all(a.end <= b.start for a, b in pairwise(row))
    for text, timed in done.items():
        if timed.action.kind.value == "F" and timed.action.stage > 0:
            giver = done[f"{timed.action.stage - 1}F{timed.action.microbatch}"]
            assert giver.end + (1 if giver.rank != timed.rank else 0) <= timed.start, text


def test_per_stage_costs_are_used_and_must_fit() -> None:
    schedule = make_schedule("gpipe", num_ranks=2, num_microbatches=1)
    assert simulate(schedule, Costs(F=(5, 1), send=(2,))).step_time == 5 + 2 + 1 + 2 + 2 + 2
    with pytest.raises(ScheduleError, match="cost F has 3 stages, the schedule 2"):
        simulate(schedule, Costs(F=(1, 1, 1)))
    with pytest.raises(ScheduleError, match="cost W must not be negative"):
        Costs(W=-1)


def test_costs_are_read_exactly() -> None:
    assert parse_costs("1,1.5,2,0.1") == Costs(1, Fraction(3, 2), 2, Fraction(1, 10))
    for text in ("1,2", "1,2,3,4,5", "a,b,c", "1,1,inf"):
        with pytest.raises(ScheduleError, match="costs are"):
            parse_costs(text)


def test_the_grid_shows_digits_letters_and_dots() -> None:
    assert render_grid(run("1f1b", 4, 8)) == (
        "rank 0  0123......aa4bb5cc6dd7ee.ff.gg.hh\n"
        "rank 1  .012....aa3bb4cc5dd6ee7ff.gg.hh..\n"
        "rank 2  ..01..aa2bb3cc4dd5ee6ff7gg.hh....\n"
        "rank 3  ...0aa1bb2cc3dd4ee5ff6gg7hh......"
    )


def test_the_grid_shows_weight_gradients_as_w_and_keeps_within_its_width() -> None:
    simulation = simulate(Schedule.from_csv("0F0,0I0,0W0"), Costs(0.1, 0.3, 0.7))
    assert render_grid(simulation, max_width=11) == "rank 0  0aaawwwwwww"


def test_the_trace_has_a_slice_for_every_action() -> None:
    trace = json.loads(json.dumps(chrome_trace(run("1f1b", 2, 3))))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == 12
    assert {s["name"] for s in slices} >= {"0F0", "1B2"}
    assert {(s["ts"], s["dur"]) for s in slices if s["name"] == "1B0"} == {(2000.0, 2000.0)}
