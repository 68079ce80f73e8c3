"""P1: a weight used twice on one path has one gradient, split backward or not."""

import torch
from torch import Tensor, nn

from autoshard.ir.graph_function import GRAD
from autoshard.testing.models import Built
from tests.bank.equal import assert_equal, double, finding, train_plain

PLAN = """
mesh { pp = 2 }
batch { micro_batch_size = 2, num_microbatches = 1 }
pipeline { split = before(tail), schedule = zb_h1 }
"""


class Twice(nn.Module):
    """Multiply by one 2 x 2 weight, and by it again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.5, -1.0], [2.0, 0.25]]))
        self.tail = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(x @ self.weight @ self.weight)


def twice() -> Built:
    torch.manual_seed(0)
    return Twice(), {"x": torch.randn(2, 2)}, lambda output, batch: output.sum()


def test_the_gradient_of_a_weight_used_twice_is_autograd_s_bit_for_bit() -> None:
    ours = assert_equal(twice(), PLAN).ours[0]
    plain = train_plain(*twice(), steps=1)[0]
    assert torch.equal(ours.grads["weight"], plain.grads["weight"])


def test_a_use_that_counts_twice_would_be_seen() -> None:
    def fault(program) -> bool:
        phases = program.stages[0].phases
        made = [name for name in ("I", "W") if phases[name].result(GRAD, "weight") is not None]
        assert made == ["W"]
        phase = phases["W"]
        parts = phase.result(GRAD, "weight").all_input_nodes
        return double(program, 0, "W", lambda node: node is parts[0])

    assert finding(twice(), PLAN, fault) == "grad weight"
