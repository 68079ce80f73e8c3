"""globalize-loss: losses and gradients of the parts of a batch add up to those of the whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.diagnostics import PassError
from autoshard.ir.graph_function import NORMALIZER
from autoshard.ir.node_info import info
from autoshard.ops.dropout import DropoutArgs, dropout
from autoshard.passes.globalize_loss import GlobalizeLoss
from autoshard.testing.models import tiny_gpt, tiny_hf
from tests.passes.data_parallel import assert_parts_add_up, globalized

WIDTH = 6


class Mlp(nn.Module):
    """Two linear layers; the loss functions of the tests read its output."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def batch(size: int = 20) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    y = torch.randint(WIDTH, (size, 3), generator=draw)
    y[torch.rand(size, 3, generator=draw) < 0.4] = -100
    y[: size // 4] = -100
    y[0, 0] = 2
    mask = (torch.rand(size, 3, generator=draw) < 0.7).double()
    x = torch.randn(size, 3, 4, generator=draw, dtype=torch.float64)
    return {"x": x, "y": y, "mask": mask}


def token_loss(out: Tensor, b: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), b["y"].flatten())


def targets(b: dict[str, Tensor]) -> Tensor:
    return torch.zeros_like(b["x"][..., :1]).expand(-1, -1, WIDTH)


def masked(out: Tensor, b: dict[str, Tensor]) -> Tensor:
    return (out.square().mean(-1) * b["mask"]).sum()


GOOD = {
    "cross entropy with ignored tokens": token_loss,
    "cross entropy of channels first": lambda o, b: F.cross_entropy(o.transpose(1, 2), b["y"]),
    "smoothed": lambda o, b: F.cross_entropy(
        o.flatten(0, 1), b["y"].flatten(), label_smoothing=0.1
    ),
    "summed cross entropy": lambda o, b: F.cross_entropy(
        o.flatten(0, 1), b["y"].flatten(), reduction="sum"
    ),
    "negative log likelihood": lambda o, b: F.nll_loss(
        o.log_softmax(-1).flatten(0, 1), b["y"].flatten()
    ),
    "class probabilities": lambda o, b: F.cross_entropy(
        o.flatten(0, 1), b["x"].sum(-1, keepdim=True).expand(-1, -1, WIDTH).flatten(0, 1).sigmoid()
    ),
    "mean squared error": lambda o, b: F.mse_loss(o, targets(b)),
    "smooth l1": lambda o, b: F.smooth_l1_loss(o, targets(b)),
    "mean": lambda o, b: o.square().mean(),
    "mean of sample means": lambda o, b: o.square().sum(-1).mean(1).mean(0),
    "sum by count": lambda o, b: o.square().sum() / o.numel(),
    "sum times one over count": lambda o, b: o.square().sum() * (1.0 / o.numel()),
    "batch mean of a divergence": lambda o, b: F.kl_div(
        o.log_softmax(-1), targets(b) + 0.2, reduction="batchmean"
    ),
    "several weighted losses": lambda o, b: (
        token_loss(o, b) + 0.3 * F.mse_loss(o, targets(b)) - 0.01 * o.mean()
    ),
    "masked mean": lambda o, b: masked(o, b) / b["mask"].sum(),
    "guarded masked mean": lambda o, b: masked(o, b) / b["mask"].sum().clamp(min=1.0),
    "masked mean with epsilon": lambda o, b: masked(o, b) / (b["mask"].sum() + 1e-3),
    "integer count": lambda o, b: masked(o, b) / (b["y"] != -100).sum().clamp(min=1),
    "a number added": lambda o, b: o.square().mean() + 3.0,
}


@pytest.mark.parametrize("name", GOOD)
def test_parts_of_a_loss_add_up(name: str) -> None:
    assert_parts_add_up(Mlp(), batch(), GOOD[name])


def test_a_term_without_the_batch_is_divided_among_the_parts() -> None:
    model = Mlp()

    def loss(out: Tensor, b: dict[str, Tensor]) -> Tensor:
        return out.square().mean() + 0.1 * model.up.weight.square().sum()

    assert_parts_add_up(model, batch(), loss)


@pytest.mark.parametrize("name", ["gpt", "gpt2", "bloom", "llama", "opt", "bert", "t5"])
@pytest.mark.parametrize("samples", [1, 2])
def test_a_model_with_dropout_adds_up(name: str, samples: int) -> None:
    sizes = {"batch": 2 * samples, "length": 8, "layers": 1, "dropout": 0.1}
    model, given, loss = tiny_gpt(**sizes) if name == "gpt" else tiny_hf(name, **sizes)
    assert_parts_add_up(model, given, loss, parts=2)


def test_unequal_token_counts_weigh_as_in_one_batch() -> None:
    """A mean of the parts' means differs: the parts hold 1 to 16 valid tokens."""
    model, given, loss = tiny_gpt(batch=4, length=16, layers=1)
    for row, valid in enumerate((1, 4, 9, 16)):
        given["labels"][row, valid:] = -100
    assert_parts_add_up(model, given, loss)
    first = {k: v[:1] for k, v in given.items()}
    program, _ = globalized(model, first, loss)
    assert list(program.forward.named(NORMALIZER)) == ["0"]
    assert [str(port) for port in program.prelude.inputs] == ["batch:labels"]


def test_losses_over_the_same_targets_share_one_normalizer() -> None:
    def twice(out: Tensor, b: dict[str, Tensor]) -> Tensor:
        return token_loss(out, b) + token_loss(2 * out, b)

    program, _ = assert_parts_add_up(Mlp(), batch(), twice)
    # `flatten` is spelled twice, so there are two targets; equal ones are counted once.
    assert len(program.prelude.outputs) <= 2


def test_class_weights_weigh_the_targets_of_the_global_batch() -> None:
    weight = torch.arange(1.0, WIDTH + 1).double()

    def weighted(out: Tensor, b: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), b["y"].flatten(), weight=weight)

    program, _ = assert_parts_add_up(Mlp(), batch(), weighted)
    assert [str(port) for port in program.prelude.inputs] == ["buffer:constant.0", "batch:y"]


def test_a_second_run_changes_nothing() -> None:
    model, given, loss = tiny_hf("gpt2", batch=2, length=8, layers=1, dropout=0.1)
    program, ctx = globalized(model, given, loss)
    before = str(program.forward.graph), [info(n) for n in program.forward.graph.nodes]
    GlobalizeLoss().run(program, ctx)
    assert before == (str(program.forward.graph), [info(n) for n in program.forward.graph.nodes])


def test_dropout_is_told_where_samples_lie() -> None:
    model, given, loss = tiny_hf("bloom", batch=2, length=8, layers=1, dropout=0.1)
    program, _ = globalized(model, given, loss)
    found = program.forward.graph.find_nodes(op="call_function", target=dropout)
    places = {(DropoutArgs(*n.args).batch_dim, DropoutArgs(*n.args).rows) for n in found}
    assert places == {(0, 1)}


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def contrast(out: Tensor, b: dict[str, Tensor]) -> Tensor:
    rows = out.mean(1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


BAD = {
    "the square of a mean": (lambda o, b: o.mean() ** 2, "not linear"),
    "a product of two means": (lambda o, b: o.mean() * o.square().mean(), "not linear"),
    "a maximum over the batch": (lambda o, b: o.amax(), "mixes the samples"),
    "a deviation over the batch": (lambda o, b: o.std(0).sum(), "mixes the samples"),
    "a softmax over the batch": (lambda o, b: (o.softmax(0) * o).sum(), "mixes the samples"),
    "a contrast of samples": (contrast, "mixes the samples"),
    "class weights of the model": (
        lambda o, b: F.cross_entropy(
            o.flatten(0, 1), b["y"].flatten(), weight=o.detach().mean((0, 1))
        ),
        "class weights of the model",
    ),
    "a position in the batch": (
        lambda o, b: (o.mean((1, 2)) * torch.arange(len(o))).mean(),
        "place in the batch",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_loss_that_has_no_parts_is_refused_by_name(name: str) -> None:
    loss, why = BAD[name]
    first = {k: v[:5] for k, v in batch().items()}
    with pytest.raises(PassError, match=why):
        globalized(Mlp().double(), first, loss)


class Centred(nn.Module):
    """A model that subtracts the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x - x.mean(0))


def test_the_refusal_names_operator_module_and_line() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Centred())
    with pytest.raises(PassError) as caught:
        globalized(model, (torch.randn(5, 4),), lambda o, b: o.sum())
    message = str(caught.value)
    assert "error[AS712]: the loss can't be made global: 'sub.Tensor' at " in message
    assert "test_globalize_loss.py:" in message
    assert "return torch.tanh(x - x.mean(0))" in message
    assert "not linear in a sum over the batch" in message


def test_batch_norm_in_train_mode_is_refused_by_name() -> None:
    first = {"x": torch.randn(5, 3, 4)}
    with pytest.raises(Exception, match=r"norm"):
        globalized(WithBatchNorm(), first, lambda o, b: o.square().mean())


def test_a_small_divisor_is_ambiguous_and_refused() -> None:
    first = {k: v[:2] for k, v in batch().items()}
    with pytest.raises(PassError, match="may be the size of this micro-batch, or a constant"):
        globalized(Mlp().double(), first, lambda o, b: o.square().sum() / 2)


def test_one_part_alone_is_never_refused() -> None:
    first = {k: v[:5] for k, v in batch().items()}
    program, _ = globalized(Mlp().double(), first, lambda o, b: o.mean() ** 2, dp=1, microbatches=1)
    assert program.prelude is None
