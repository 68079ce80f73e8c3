"""Which actions a program's ranks get."""

import pytest

from autoshard.mesh import Mesh
from autoshard.passes.cut_stages import CutStages
from autoshard.passes.lower_joint import LowerJoint
from autoshard.passes.lower_schedule import LowerSchedule
from autoshard.passes.split_phases import SplitPhases
from autoshard.plan import Call, PipelineBlock, ZeroBlock
from autoshard.schedule import Kind, find_problems
from tests.passes.programs import compile_with, context
from tests.passes.toys import Gpt, token_batch

CUT = Call("before", ("h.1",))
PASSES = (CutStages(), LowerJoint(), SplitPhases())


def scheduled(name: str | Call, **options: bool):
    """Return a GPT in two stages with its schedule."""
    ctx = context(Mesh.of(pp=2), pipeline=PipelineBlock(CUT, name))
    program = compile_with(PASSES, Gpt(), token_batch(), ctx, **options)
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
