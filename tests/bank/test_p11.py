"""P11: an output that enters the loss of some micro-batches only."""

import torch
from torch import Tensor, nn

from autoshard.ir.graph_function import BOUNDARY, TANGENT
from autoshard.testing.models import Built
from tests.bank.equal import assert_equal, double, finding

PLAN = """
mesh { pp = 2 }
batch { micro_batch_size = 1, num_microbatches = 4 }
pipeline { split = before(b), schedule = zb_h2 }
"""


class Auxiliary(nn.Module):
    """Give an auxiliary value beside the output; a third value only counts, without gradient."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.side, self.b = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.a(x).tanh()
        aux, still = self.side(hidden), hidden.detach() * 2
        return self.b(hidden), aux, still


def odd_loss(output: tuple[Tensor, Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Let the auxiliary value count in odd samples only."""
    main, aux, still = output
    main_loss = (main - batch["y"] + still).pow(2).mean()
    return main_loss + (aux.pow(2).mean(-1) * batch["is_odd"]).mean()


def auxiliary() -> Built:
    torch.manual_seed(0)
    draw = {n: torch.randn(4, 8) for n in ("x", "y")}
    return Auxiliary(), {**draw, "is_odd": torch.tensor([0.0, 1.0, 0.0, 1.0])}, odd_loss


def test_an_output_without_gradient_in_some_micro_batches_trains_as_one_process_does() -> None:
    assert_equal(auxiliary(), PLAN)


def received(program) -> dict:
    """Return the boundary values of the second stage: one of them needs no gradient."""
    return program.stages[1].phases["F"].named(BOUNDARY)


def test_a_gradient_from_the_wrong_micro_batches_would_be_seen() -> None:
    def fault(program) -> bool:
        sent = program.stages[1].phases["I"].named_results(TANGENT)
        assert None not in sent.values() and len(sent) < len(received(program))
        flag = program.stages[1].phases["F"].node("batch", "is_odd")
        return double(program, 1, "F", lambda node: node is flag)

    assert finding(auxiliary(), PLAN, fault) == "loss"
