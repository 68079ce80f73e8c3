"""Z3: ranks that would run a module a different number of times are refused, not hung."""

from torch import Tensor, nn

from tests.bank.equal import refusal
from tests.bank.models import rows

PLAN = """
mesh { dp = 2 }
batch { micro_batch_size = 2 }
zero { stage = 3, param_persistence_threshold = 0KiB }
"""


class Branching(nn.Module):
    """Runs its second layer where the samples' sum is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.sum() > 0:
            x = self.b(x)
        return x


def test_a_branch_on_values_is_refused_with_its_line() -> None:
    text = refusal(rows(Branching()), PLAN)
    assert "AS701" in text and "if x.sum() > 0:" in text
    assert "test_z3.py:" in text and "= help: " in text
