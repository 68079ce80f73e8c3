"""Which actions a program's ranks get."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from autoshard.diagnostics import ScheduleError
from autoshard.mesh import Mesh
from autoshard.passes.cut_stages import CutStages
from autoshard.passes.lower_joint import LowerJoint
from autoshard.passes.lower_schedule import LowerSchedule
from autoshard.passes.split_phases import SplitPhases
from autoshard.plan import Call, PipelineBlock, ZeroBlock
from autoshard.schedule import Kind, find_problems, lower_schedule, make_schedule
from autoshard.schedule.action import COMPUTE
from autoshard.schedule.simulate import simulate
from tests.passes.programs import compile_with, context
from tests.passes.toys import Gpt, token_batch

CUT = Call("before", ("h.1",))
PASSES = (CutStages(), LowerJoint(), SplitPhases())


@cache
def phased(training: bool = True):
    """Return a GPT in two stages and phases."""
    ctx = context(Mesh.of(pp=2), pipeline=PipelineBlock(CUT, "1f1b"))
    return compile_with(PASSES, Gpt(), token_batch(), ctx, training=training)


def scheduled(name: str | Call, training: bool = True, **pipeline: object):
    """Return a GPT in two stages with its schedule."""
    ctx = context(Mesh.of(pp=2), pipeline=PipelineBlock(CUT, name, **pipeline))
    program = replace(phased(training), schedule=None)
    LowerSchedule().run(program, ctx)
    return program


def kinds(program) -> set[Kind]:
    """Return the kinds of action of all ranks."""
    return {action.kind for row in program.schedule.ranks for action in row}


@pytest.mark.parametrize("name", ("gpipe", "1f1b", "zb_h1"))
def test_every_schedule_is_valid_and_has_transfers(name: str) -> None:
    program = scheduled(name)
    assert find_problems(program.schedule) == ()
    assert {Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B} <= kinds(program)
    assert Kind.REDUCE_GRAD not in kinds(program)


def test_an_eval_program_has_forwards_only() -> None:
    program = scheduled("1f1b", training=False)
    assert kinds(program) == {Kind.F, Kind.SEND_F, Kind.RECV_F}


def test_reductions_stand_where_a_stage_has_a_graph_for_them() -> None:
    ctx = context(Mesh.of(pp=2), pipeline=PipelineBlock(CUT, "1f1b"))
    program = compile_with(PASSES, Gpt(), token_batch(), ctx)
    program.stages[1].phases["R"] = program.stages[1].phases["W"]
    LowerSchedule().run(program, ctx)
    first, second = program.schedule.ranks
    assert [str(a) for a in second if a.kind is Kind.REDUCE_GRAD] == ["1REDUCE_GRAD"]
    assert Kind.REDUCE_GRAD not in {a.kind for a in first}


def test_parameters_gathered_once_per_step_are_gathered_by_the_schedule() -> None:
    zero = ZeroBlock(stage=3, reshard_after_forward="step")
    ctx = context(Mesh.of(pp=2), pipeline=PipelineBlock(CUT, "1f1b"), zero=zero)
    program = compile_with(PASSES, Gpt(), token_batch(), ctx)
    for stage in program.stages:
        stage.phases["U"] = stage.phases["W"]
    LowerSchedule().run(program, ctx)
    assert {Kind.UNSHARD, Kind.RESHARD} <= kinds(program)
    assert find_problems(program.schedule, unshard="step") == ()


def test_a_second_run_changes_nothing() -> None:
    program = scheduled("1f1b")
    first = program.schedule
    LowerSchedule().run(program, context(Mesh.of(pp=2), pipeline=PipelineBlock(CUT)))
    assert program.schedule is first


def test_a_schedule_file_that_is_not_there_is_named() -> None:
    with pytest.raises(Exception, match=r"can't read the schedule `nowhere.csv`"):
        scheduled(Call("csv", ("nowhere.csv",)))


def csv(tmp_path: Path, *rows: str) -> Call:
    """Write a schedule of two ranks as a file and return the plan's value for it."""
    file = tmp_path / "own.csv"
    file.write_text("\n".join(rows))
    return Call("csv", (str(file),))


def test_a_schedule_file_is_lowered_like_any_other(tmp_path: Path) -> None:
    made = make_schedule("zb_h1", num_ranks=2, num_microbatches=2)
    program = scheduled(csv(tmp_path, made.to_csv()))
    assert program.schedule.only(COMPUTE).ranks == made.ranks
    assert {Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B} <= kinds(program)


def test_transfers_of_a_file_are_made_anew(tmp_path: Path) -> None:
    made = lower_schedule(
        make_schedule("1f1b", num_ranks=2, num_microbatches=2),
        reduce_per="microbatch",
        unshard="step",
    )
    assert (
        scheduled(csv(tmp_path, made.to_csv())).schedule.ranks == scheduled("1f1b").schedule.ranks
    )


LATE = ("0F0,0F1,0B1,0B0", "1F0,1F1,1B1,1B0")


def test_gradients_in_the_order_of_a_file_are_asked_for_by_name(tmp_path: Path) -> None:
    file = csv(tmp_path, *LATE)
    with pytest.raises(ScheduleError, match="`accumulation_order = schedule` adds gradients"):
        scheduled(file)
    program = scheduled(file, accumulation_order="schedule")
    assert [str(a) for a in program.schedule.only({Kind.B}).ranks[0]] == ["0B1", "0B0"]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (("0F0,0B0", "1F0,1B0"), {}, "for 2 ranks and 1 microbatches"),
        (LATE, {"virtual_stages": 2}, "has 2 stages on 2 ranks, .* virtual_stages = 2"),
        (("0F0,0F1,0B0", "1F0,1F1,1B0,1B1"), {}, "stage 0, micro-batch 1 needs B once"),
        (("0F0,0X0", "1F0"), {}, "'0X0' isn't an action of a schedule"),
    ],
)
def test_a_file_that_does_not_fit_is_told_with_its_numbers(
    tmp_path: Path, rows: tuple[str, ...], options: dict[str, int], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        scheduled(csv(tmp_path, *rows), **options)


def test_a_bound_on_activations_reaches_the_schedules_that_keep_to_one() -> None:
    held = simulate(scheduled("zb_2p", max_in_flight=1).schedule).peak_in_flight()
    assert max(held) == 1 < max(simulate(scheduled("zb_2p").schedule).peak_in_flight())


def test_a_bound_that_a_schedule_cannot_keep_names_what_it_needs() -> None:
    with pytest.raises(ScheduleError, match="holds 2 micro-batches in flight, more than"):
        scheduled("1f1b", max_in_flight=1)
