"""A captured program is compared with the eager model, and can tell when they differ."""

import pytest
import torch
from torch import nn

from autoshard.diagnostics import CaptureError
from autoshard.ir.capture import capture
from autoshard.ir.compare import compare_with_eager
from autoshard.ir.evaluate import model_tensors, run_reference
from autoshard.ir.promote import promote
from autoshard.mesh import Mesh
from autoshard.testing.models import tiny_gpt, tiny_hf

MESH = Mesh.of(tp=2)
aten = torch.ops.aten


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "llama", "mistral", "opt", "bert", "t5"])
def test_loss_and_gradients_are_those_of_the_eager_model(kind: str) -> None:
    model, batch, loss = tiny_hf(kind, dropout=0.1)
    report = capture(model, batch, loss, mesh=MESH).compared
    assert report.was_compared and report.loss < 1e-6 and report.gradient < 1e-5


def test_a_program_that_computes_something_else_is_refused() -> None:
    model, batch, loss = tiny_gpt()
    program = capture(model, batch, loss, mesh=MESH)
    gelu = next(n for n in program.forward.graph.nodes if n.target is aten.gelu.default)
    gelu.kwargs = {"approximate": "tanh"}
    with pytest.raises(CaptureError, match="differs by"):
        compare_with_eager(program, model, batch, loss)


def test_a_lost_gradient_is_refused() -> None:
    model, batch, loss = tiny_gpt()
    program = capture(model, batch, loss, mesh=MESH)
    gelu = next(n for n in program.forward.graph.nodes if n.target is aten.gelu.default)
    with program.forward.graph.inserting_before(gelu):
        stop = program.forward.graph.call_function(aten.detach.default, gelu.args)
    gelu.args = (stop,)
    with pytest.raises(CaptureError, match="gradient of"):
        compare_with_eager(program, model, batch, loss)


def test_comparing_leaves_the_users_model_alone() -> None:
    model, batch, loss = tiny_gpt(dropout=0.1)
    model.h[0].eval()
    weight, state = model.wte.weight, torch.random.get_rng_state()
    capture(model, batch, loss, mesh=MESH)
    assert model.wte.weight is weight and model.head.weight is weight and weight.grad is None
    assert model.training and not model.h[0].training and not model.h[0].attn.training
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_meta_model_is_captured_and_not_compared() -> None:
    with torch.device("meta"):
        model, batch, loss = nn.Linear(4, 3), torch.zeros(2, 4), lambda out, batch: out.mean()
    report = capture(model, (batch,), loss, mesh=MESH).compared
    assert str(report) == "capture not compared: the parameters are on the meta device"


def test_a_promoted_program_computes_in_float64_throughout() -> None:
    model, batch, loss = tiny_hf("llama")
    program = promote(capture(model, batch, loss, mesh=MESH, compare=False))
    nodes = [n for n in program.forward.graph.nodes if n.op != "output"]
    values = [n.meta["val"] for n in nodes if isinstance(n.meta["val"], torch.Tensor)]
    assert {v.dtype for v in values if v.is_floating_point()} == {torch.float64}
    exact = {n: v.double() if v.is_floating_point() else v for n, v in model_tensors(model).items()}
    whole = run_reference(program, exact, batch)
    halves = [
        run_reference(
            promote(capture(model, half, loss, mesh=MESH, compare=False)), exact, half
        ).loss
        for half in ({k: v[:2] for k, v in batch.items()}, {k: v[2:] for k, v in batch.items()})
    ]
    counts = [(batch["labels"][rows, 1:] != -100).sum() for rows in (slice(0, 2), slice(2, 4))]
    mean = sum(x * n for x, n in zip(halves, counts, strict=True)) / sum(counts)
    assert abs(mean - whole.loss) < 1e-13


def test_a_loss_without_parameters_has_no_gradients_to_compare() -> None:
    def loss(output: torch.Tensor, batch: object) -> torch.Tensor:
        return output.detach().sum()

    report = capture(nn.Linear(4, 4), (torch.zeros(2, 4),), loss, mesh=MESH).compared
    assert report.was_compared and not report.worst


def test_a_loss_that_is_not_finite_is_said_to_be_the_models_own() -> None:
    model, batch, loss = tiny_gpt()
    batch["labels"][:] = -100
    with pytest.raises(CaptureError, match="the loss of the eager model is nan"):
        capture(model, batch, loss, mesh=MESH)
