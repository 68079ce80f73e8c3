"""Stages, joint graphs and phases together compute what eager autograd computes, in float64."""

import pytest
import torch

from autoshard.mesh import Mesh
from autoshard.passes.cut_stages import CutStages
from autoshard.passes.lower_joint import LowerJoint
from autoshard.passes.split_phases import SplitPhases
from tests.passes.evaluate import run_step
from tests.passes.programs import (
    TOLERANCE,
    before,
    compile_with,
    context,
    even,
    expected,
    leaves,
    state_of,
    worst,
)
from tests.passes.toys import (
    WIDTH,
    Frozen,
    FusedNorms,
    Gpt,
    PermutedHidden,
    Rms,
    Skip,
    TwiceOnOnePath,
    token_batch,
)

UNITS = ("emb", "h.*", "head")
GPTS = {
    "tied": {},
    "untied": {"tied": False},
    "masks": {"masked": True},
    "rotary": {"rotary": True},
    "skip": {"skip": True, "tied": False},
}


def check(model, batches, pipeline, stages, weights="apart", dtype=torch.float64) -> None:
    """Compare loss and all gradients of the compiled program with eager autograd."""
    model = model.to(dtype)
    ctx = context(Mesh.of(pp=stages), pipeline=pipeline)
    passes = (CutStages(), LowerJoint(), SplitPhases(weights))
    program = compile_with(passes, model, batches[0], ctx)
    loss, grads = expected(model, batches)
    step = run_step(program, state_of(model, program), {0: [leaves(b) for b in batches]})
    tolerance = TOLERANCE if dtype == torch.float64 else 1e-4
    assert abs(step.loss - loss) <= tolerance * abs(loss)
    assert worst(step.grads, grads) <= tolerance


@pytest.mark.parametrize("stages", (1, 2, 4))
@pytest.mark.parametrize("kind", GPTS)
def test_a_gpt_in_stages_gives_the_loss_and_gradients_of_eager(kind: str, stages: int) -> None:
    batches = [token_batch(), token_batch()]
    check(Gpt(**GPTS[kind]), batches, even(*UNITS), stages)


@pytest.mark.parametrize("weights", ("apart", "together"))
def test_backward_in_one_piece_equals_backward_in_two(weights: str) -> None:
    check(Gpt(blocks=2), [token_batch()], before("h.1"), 2, weights)


def test_float32_graphs_run_too() -> None:
    check(Gpt(blocks=2), [token_batch()], before("h.1"), 2, dtype=torch.float32)


def test_a_skip_over_a_stage_is_relayed() -> None:
    batch = (torch.randn(2, WIDTH).double(), torch.randn(2, WIDTH).double())
    check(Skip(), [batch], before("b", "c"), 3)


def test_a_weight_used_twice_on_one_path_gets_the_bits_of_autograd() -> None:
    model = TwiceOnOnePath().double()
    batch = (torch.randn(3, 2).double(), torch.randn(3, 2).double())
    ctx = context(Mesh.of(pp=1))
    passes = (CutStages(), LowerJoint(), SplitPhases("apart"))
    program = compile_with(passes, model, batch, ctx)
    _, grads = expected(model, [batch])
    step = run_step(program, state_of(model, program), {0: [leaves(batch)]})
    assert torch.equal(step.grads["w"], grads["w"])
    assert torch.equal(step.grads["first.weight"], grads["first.weight"])


def test_a_permuted_value_crosses_stages() -> None:
    batch = (torch.randn(2, WIDTH, 3).double(), torch.randn(2, WIDTH, 3).double())
    check(PermutedHidden(), [batch, batch], before("b"), 2)


@pytest.mark.parametrize("stages", (("b",), ("b", "c")))
def test_frozen_layers_get_no_gradient_and_the_rest_is_right(stages: tuple[str, ...]) -> None:
    batch = (torch.randn(2, WIDTH).double(), torch.randn(2, WIDTH).double())
    check(Frozen(), [batch], before(*stages), len(stages) + 1)


@pytest.mark.parametrize("rms", (False, True))
def test_fused_norms_at_a_border_are_taken_apart(rms: bool) -> None:
    batch = (torch.randn(2, WIDTH).double(), torch.randn(2, WIDTH).double())
    check(FusedNorms(rms), [batch, batch], before("norm_b", "norm_c"), 3)


def test_operations_that_work_in_place_inside_become_functional() -> None:
    batch = (torch.randn(2, WIDTH).double(), torch.randn(2, WIDTH).double())
    check(Rms(), [batch, batch], before("fc"), 2)
