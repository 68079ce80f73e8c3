"""Z11: the gradient of a replicated weight that a custom operator reads is summed over dp."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from autoshard.ir.placement import Placement
from autoshard.ir.rules import table
from autoshard.ir.rules.call import Call, Choice
from autoshard.ir.rules.factors import Factors, solve
from autoshard.testing.models import Built
from autoshard.testing.mutants import named
from tests.bank.equal import assert_equal, finding, refusal
from tests.bank.models import rows

PLAN = """
mesh {{ dp = 2 }}
batch {{ micro_batch_size = 1, num_microbatches = 2 }}
zero {{ stage = {stage}, param_persistence_threshold = 0KiB }}
"""
X, W = ("sample", "feature"), ("feature",)


@torch.library.custom_op("autoshard_case::scaled", mutates_args=())
def scaled(x: Tensor, w: Tensor) -> Tensor:
    """Scale the features of x (B, D)."""
    return x * w


@torch.library.custom_op("autoshard_case::scaled_backward", mutates_args=())
def scaled_backward(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (B, D) and w (D)."""
    return grad * w, (grad * x).sum(0)


scaled.register_fake(lambda x, w: torch.empty_like(x))
scaled_backward.register_fake(lambda grad, x, w: (torch.empty_like(x), torch.empty_like(w)))
scaled.register_autograd(
    lambda ctx, grad: scaled_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def rule(call: Call, ins: tuple[Placement, ...]) -> Choice:
    return solve(Factors((X, W), (X,)), call, ins)


def rule_of_backward(call: Call, ins: tuple[Placement, ...]) -> Choice:
    return solve(Factors((X, X, W), (X, W), sums=frozenset({"sample"})), call, ins)


class Custom(nn.Module):
    """Two layers around the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.w, self.b = nn.Linear(8, 8), nn.Parameter(torch.rand(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.ops.autoshard_case.scaled(self.a(x).tanh(), self.w))


def custom() -> Built:
    torch.manual_seed(0)
    return rows(Custom())


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ops = torch.ops.autoshard_case
    monkeypatch.setitem(table.RULES, ops.scaled.default, rule)
    monkeypatch.setitem(table.RULES, ops.scaled_backward.default, rule_of_backward)
    yield


@pytest.mark.parametrize("stage", (0, 3))
def test_its_weight_is_trained_as_in_one_process(rules: None, stage: int) -> None:
    assert_equal(custom(), PLAN.format(stage=stage))


def test_a_gradient_kept_without_its_sum_is_seen(rules: None) -> None:
    text = finding(custom(), PLAN.format(stage=0), named("skip-reduction").plant)
    assert "ranks 0 and 1 hold different" in text


def test_without_a_rule_the_operator_is_refused_by_line() -> None:
    text = refusal(custom(), PLAN.format(stage=3))
    assert "'scaled.default' at test_z11.py:" in text and "it has no placement rule" in text
