"""What F keeps, what I and W compute, and that together they are the joint graph."""

import pytest
import torch

from autoshard.diagnostics import VerifyError
from autoshard.ir.aliases import view_base
from autoshard.ir.graph_function import GRAD, PARAM, SAVED, TANGENT
from autoshard.ir.invariants_pipeline import check_phased
from autoshard.mesh import Mesh
from autoshard.passes.cut_stages import CutStages
from autoshard.passes.lower_joint import LowerJoint
from autoshard.passes.split_phases import SplitPhases
from autoshard.plan import PipelineBlock
from tests.passes.programs import before, compile_with, context
from tests.passes.toys import Gpt, token_batch

aten = torch.ops.aten


def split(weights: str = "apart", **options: bool):
    """Return a GPT in two stages, in phases that keep the invariant."""
    ctx = context(Mesh.of(pp=2), pipeline=before("h.1"))
    passes = [CutStages(), LowerJoint(), SplitPhases(weights)]
    program = compile_with(passes, Gpt(), token_batch(), ctx, **options)
    check_phased(program)
    return program


def products(function) -> int:
    """Count matrix products."""
    return len(function.graph.find_nodes(op="call_function", target=aten.mm.default))


def test_input_gradients_and_weight_gradients_are_apart() -> None:
    last = split().stages[1]
    assert {p.kind for p in last.phases["I"].outputs} == {TANGENT, SAVED}
    assert {p.kind for p in last.phases["W"].outputs} == {GRAD}
    assert products(last.phases["I"]) == products(last.phases["W"]) == 2 * 4 + 1


def test_weight_gradients_read_no_parameter() -> None:
    for stage in split().stages[1:]:
        assert not stage.phases["W"].named(PARAM)


def test_the_first_stage_computes_no_input_gradient() -> None:
    first = split().stages[0]
    assert not first.phases["I"].outputs
    assert set(first.phases["W"].named_results(GRAD)) == set(first.joint.named_results(GRAD))


def test_forward_keeps_each_storage_once_and_no_parameter() -> None:
    for stage in split().stages:
        kept = [node for node in stage.phases["F"].named_results(SAVED).values()]
        bases = [view_base(node) for node in kept]
        assert len(set(bases)) == len(bases)
        assert not set(stage.phases["F"].named(PARAM).values()) & set(bases)


def test_backward_together_is_in_one_phase() -> None:
    last = split("together").stages[1]
    assert {p.kind for p in last.phases["I"].outputs} == {TANGENT, GRAD}
    assert not last.phases["W"].outputs


@pytest.mark.parametrize(
    ("schedule", "apart"), [("1f1b", False), ("gpipe", False), ("zb_h1", True)]
)
def test_auto_splits_for_schedules_that_run_the_halves_apart(schedule: str, apart: bool) -> None:
    ctx = context(Mesh.of(pp=2), pipeline=PipelineBlock(schedule=schedule))
    assert SplitPhases()._apart(ctx.resolved) is apart


def test_saved_values_are_named_after_module_and_operation() -> None:
    names = set(split().stages[1].phases["F"].named_results(SAVED))
    assert {"h.1.ln:native_layer_norm.1", "h.2.up:view"} <= names


def test_an_eval_program_has_only_a_forward_phase_that_keeps_nothing() -> None:
    for stage in split(training=False).stages:
        assert set(stage.phases) == {"F"}
        assert not stage.phases["F"].named_results(SAVED)


def test_a_second_run_changes_nothing() -> None:
    program = split()
    before_run = [dict(stage.phases) for stage in program.stages]
    SplitPhases("apart").run(program, context(Mesh.of(pp=2)))
    assert [dict(stage.phases) for stage in program.stages] == before_run


def test_check_phased_sees_a_value_that_is_not_kept() -> None:
    program = split()
    forward = program.stages[1].phases["F"]
    forward.set_outputs(forward.results[:-1], forward.outputs[:-1])
    with pytest.raises(VerifyError, match="which no earlier phase keeps"):
        check_phased(program)


def test_check_phased_sees_a_computation_done_twice() -> None:
    program = split()
    forward = program.stages[1].phases["F"]
    gelu = forward.graph.find_nodes(op="call_function", target=aten.gelu.default)[0]
    with forward.graph.inserting_after(gelu):
        forward.graph.node_copy(gelu, lambda n: n)
    with pytest.raises(VerifyError, match=r"phases have 3 of aten.gelu.default, the joint graph 2"):
        check_phased(program)
