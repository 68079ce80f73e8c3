"""The proof of order finds every circle and refuses no program that can run."""

import dataclasses
import time

import pytest

from autoshard.diagnostics import ScheduleError
from autoshard.mesh import Mesh
from autoshard.schedule import (
    SCHEDULES,
    Action,
    Event,
    Inside,
    Kind,
    Schedule,
    lower_schedule,
    make_schedule,
    prove_order,
    spell_out,
)

SEMANTICS = ("rendezvous", "streams")


def lowered(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """Return a lowered schedule with gathers and reductions per step."""
    made = make_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return lower_schedule(made, reduce_per="step", unshard="step")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_every_lowered_schedule_runs_under_both_semantics_batched_or_not(name, num_ranks) -> None:
    for num_microbatches in (1, 3, 8, 13):
        schedule = lowered(name, num_ranks, num_microbatches)
        for is_batched in (False, True):
            programs = spell_out(schedule, is_batched=is_batched)
            assert all(prove_order(programs, semantics).ok for semantics in SEMANTICS)


# pytorch #172668, first report: two ranks with two stages each. Both post the send of one
# stage before the receive of the other, and neither send can end.
SENDS_FIRST = """\
0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1,2RECV_B0,2B0,2SEND_B0,\
2RECV_B1,2B1,2SEND_B1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3B0,3SEND_B0,3RECV_F1,3F1,3B1,3SEND_B1,\
1RECV_B0,1B0,1SEND_B0,1RECV_B1,1B1,1SEND_B1
"""

# Second report: receive before send on the odd rank. The gradient that rank 0 reads next stands
# behind a forward that rank 1 takes only after it has sent that gradient.
CROSSED = """\
0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1,0F2,0SEND_F2,2RECV_B0,2B0,\
2SEND_B0,2RECV_B1,2B1,2SEND_B1,2RECV_F2,2F2,2SEND_F2,0RECV_B0,0B0,0RECV_B1,0B1,2RECV_B2,2B2,\
2SEND_B2,0RECV_B2,0B2
1RECV_F0,1F0,1RECV_F1,1SEND_F0,1F1,3RECV_F0,1SEND_F1,3F0,3B0,3RECV_F1,3SEND_B0,3F1,3B1,1RECV_F2,\
3SEND_B1,1F2,1RECV_B0,1SEND_F2,1B0,1RECV_B1,1SEND_B0,1B1,3RECV_F2,1SEND_B1,3F2,3B2,3SEND_B2,\
1RECV_B2,1B2,1SEND_B2
"""


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_sends_before_receives_on_both_ranks_deadlock(semantics) -> None:
    verdict = prove_order(spell_out(Schedule.from_csv(SENDS_FIRST)), semantics)
    assert verdict.reason == "cycle"
    assert verdict.message == (
        f"deadlock under {semantics}: ranks 0 and 1 wait for each other\n"
        "  rank 0 does '2RECV_F0' only after '0SEND_F1'\n"
        "  rank 1 does '1RECV_F1' only after '1SEND_F0'"
    )


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_a_gradient_behind_a_forward_that_waits_for_it_deadlocks(semantics) -> None:
    verdict = prove_order(spell_out(Schedule.from_csv(CROSSED)), semantics)
    assert verdict.reason == "cycle"
    assert "rank 0 does '2RECV_B0' only after '0SEND_F2'" in verdict.message
    assert "rank 1 does '1RECV_F2' only after '3SEND_B0'" in verdict.message


@pytest.mark.parametrize("text", [SENDS_FIRST, CROSSED])
def test_our_lowering_of_the_reported_schedules_runs(text) -> None:
    reported = Schedule.from_csv(text)
    compute = tuple(tuple(a for a in row if a.kind in (Kind.F, Kind.B)) for row in reported.ranks)
    made = dataclasses.replace(reported, ranks=compute)
    ours = lower_schedule(made, reduce_per="step", unshard="never")
    assert all(prove_order(spell_out(ours), semantics).ok for semantics in SEMANTICS)


def test_an_exchange_runs_when_its_send_and_receive_are_posted_together() -> None:
    text = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n" + (
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    schedule = Schedule.from_csv(text)
    assert prove_order(spell_out(schedule)).reason == "cycle"
    assert prove_order(spell_out(schedule, is_batched=True)).ok


def test_fewer_microbatches_than_stages_with_a_full_warmup_never_meet() -> None:
    rows = ("0F0,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0")
    verdict = prove_order(spell_out(Schedule.from_csv("\n".join(rows))))
    assert verdict.reason == "missing"
    assert "rank 1 waits for ever at '1RECV_F1'" in verdict.message
    assert "rank 0 does 1 of 2 sends there" in verdict.message


def test_transfers_of_two_kinds_in_another_order_are_a_mismatch() -> None:
    rows = ("0F0,3B0,0SEND_F0,3SEND_B0", "2RECV_B0,1RECV_F0,1F0,2F0,2B0,1B0")
    verdict = prove_order(spell_out(Schedule.from_csv("\n".join(rows))))
    assert verdict.reason == "mismatch"
    assert "rank 0 does '0SEND_F0' where rank 1 does '2RECV_B0'" in verdict.message


def test_streams_allow_what_rendezvous_does_not() -> None:
    """Collectives of two groups may be issued in any order when their streams are separate."""
    first, second = (0, 1), (1, 0)
    a = [Event(0, "collective", first, "x"), Event(0, "collective", second, "y")]
    b = [Event(1, "collective", second, "y"), Event(1, "collective", first, "x")]
    assert prove_order([a, b], "streams").ok
    assert prove_order([a, b], "rendezvous").reason == "cycle"


def test_a_wait_between_them_makes_streams_deadlock_too() -> None:
    first, second = (0, 1), (1, 0)
    a = [
        Event(0, "collective", first, "x"),
        Event(0, "wait", first, "x"),
        Event(0, "collective", second, "y"),
    ]
    b = [
        Event(1, "collective", second, "y"),
        Event(1, "compute"),  # waits for all that no wait names
        Event(1, "collective", first, "x"),
    ]
    assert prove_order([a, b], "streams").reason == "cycle"


def test_a_wait_for_what_was_never_started_is_refused() -> None:
    verdict = prove_order([[Event(0, "wait", (0, 1), "x", "node wait_3")], []])
    assert verdict.message == "rank 0 waits at 'node wait_3' for what it never started"


def test_a_collective_of_another_size_on_one_rank_is_a_mismatch() -> None:
    group = (0, 1)
    programs = [[Event(r, "collective", group, f"all_reduce f32[{4 + r}]")] for r in group]
    verdict = prove_order(programs)
    assert verdict.reason == "mismatch"
    assert "f32[4]" in verdict.message and "f32[5]" in verdict.message


def test_a_rank_outside_the_group_of_its_collective_is_refused() -> None:
    assert prove_order([[], [], [Event(2, "collective", (0, 1), "x")]]).reason == "mismatch"
    assert prove_order([[Event(0, "send", (1, 0), "x")], []]).reason == "mismatch"


def inside(num_stages: int) -> dict[tuple[Kind, int], list[Inside]]:
    """Return what graphs of a block with tensor and data parallelism hold, about."""
    graphs = {}
    for stage in range(num_stages):
        gathers, reduces = [Inside("dp", "all_gather")] * 2, [Inside("tp", "all_reduce")] * 4
        graphs[Kind.F, stage] = gathers + reduces
        graphs[Kind.I, stage] = gathers + reduces + [Inside("dp", "reduce_scatter")]
        graphs[Kind.UNSHARD, stage] = [Inside("dp", "all_gather")]
        graphs[Kind.REDUCE_GRAD, stage] = [Inside(("dp", "tp"), "all_reduce")]
    return graphs


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_ranks_that_are_alike_are_checked_once(semantics) -> None:
    programs = spell_out(lowered("1f1b", 4, 6), Mesh.of(pp=4, dp=2, tp=2), inside(4))
    verdict = prove_order(programs, semantics)
    assert (verdict.ok, verdict.num_ranks, verdict.num_checked) == (True, 16, 4)


def test_one_rank_that_differs_is_seen_among_many_that_are_alike() -> None:
    programs = spell_out(lowered("1f1b", 4, 6), Mesh.of(pp=4, dp=2, tp=2), inside(4))
    lost = next(i for i, e in enumerate(programs[13]) if e.kind == "collective" and i > 40)
    del programs[13][lost]
    verdict = prove_order(programs)
    assert verdict.reason in ("mismatch", "missing") and "rank 13" in verdict.message


def test_two_groups_taken_in_another_order_by_two_ranks_deadlock() -> None:
    """Ranks 0 and 3 of a 2 x 2 mesh take tp first, ranks 1 and 2 dp first: nobody begins."""
    mesh = Mesh.of(dp=2, tp=2)
    programs = []
    for rank in range(4):
        axes = ("tp", "dp") if rank in (0, 3) else ("dp", "tp")
        programs.append([Event(rank, "collective", mesh.group(rank, a), a) for a in axes])
    verdict = prove_order(programs)
    assert verdict.reason == "cycle"
    assert verdict.message == (
        "deadlock under rendezvous: ranks 0 and 1 wait for each other (each stands for those like "
        "it: 2 kinds among 4 ranks)\n"
        "  rank 0 does 'dp' only after 'tp'\n"
        "  rank 1 does 'tp' only after 'dp'"
    )


def test_a_mesh_of_384_ranks_takes_seconds() -> None:
    started = time.process_time()
    programs = spell_out(lowered("1f1b", 12, 32), Mesh.of(pp=12, dp=4, tp=8), inside(12))
    verdict = prove_order(programs)
    assert (verdict.ok, verdict.num_ranks, verdict.num_checked) == (True, 384, 12)
    assert time.process_time() - started < 20


def test_a_mesh_that_has_no_place_for_the_schedule_is_refused() -> None:
    with pytest.raises(ScheduleError, match="for 4 pipeline ranks, the mesh has pp 2"):
        spell_out(lowered("1f1b", 4, 4), Mesh.of(pp=2))


def test_a_transfer_past_the_last_stage_is_refused() -> None:
    schedule = dataclasses.replace(lowered("1f1b", 1, 1), ranks=((Action(Kind.SEND_F, 0, 0),),))
    with pytest.raises(ScheduleError, match="0SEND_F0 has no stage 1 to meet"):
        spell_out(schedule)
