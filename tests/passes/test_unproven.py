"""An operator that the rule table doesn't know runs whole, says so, and is an error if wanted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoshard.diagnostics import PlacementError
from autoshard.frontend import compile_plan
from autoshard.ir.rules import table
from autoshard.proof.types import check_types
from tests.bank.equal import assert_equal, read

PLAN = "mesh { tp = 2 }\nbatch { micro_batch_size = 4 }\ntensor { up: colwise, down: rowwise }"


class Odd(nn.Module):
    """An MLP around an operator without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each row of x (B, D)."""
        return self.down((self.up(x).sigmoid() - 0.5).erfinv())


def odd() -> tuple:
    assert torch.ops.aten.erfinv.default not in table.RULES, "find another operator"
    torch.manual_seed(0)
    return Odd(), {"x": torch.randn(4, 4)}, lambda output, batch: output.square().mean()


def test_an_unknown_operator_is_gathered_and_right() -> None:
    assert_equal(odd(), PLAN, steps=1)


def test_it_is_remarked_and_unproven() -> None:
    model, batch, loss = odd()
    compiled = compile_plan(model, read(PLAN), batch, loss)
    (text,) = [r.message for r in compiled.remarks if r.kind == "missed" and "erf" in r.message]
    assert text.startswith("unproven: no placement rule for 'aten.erfinv.default' at ")
    assert text.endswith("; it gathers 1 inputs")
    (op,) = [op for op in check_types(compiled.program).unproven if "erfinv" in op]
    assert "test_unproven.py:" in op


def test_strict_refuses_it_by_operator_module_and_line() -> None:
    model, batch, loss = odd()
    with pytest.raises(PlacementError) as caught:
        compile_plan(model, read(PLAN), batch, loss, strict=True)
    message = str(caught.value)
    assert caught.value.code == "AS408" and len(caught.value.diagnostics) == 1
    assert "'aten.erfinv.default' at " in message
    assert "test_unproven.py:" in message
    assert "self.down((self.up(x).sigmoid() - 0.5).erfinv())" in message
    model, batch, loss = odd()
    known = "mesh { tp = 2 }\nbatch { micro_batch_size = 4 }\ntensor { down: colwise(gather) }"
    with pytest.raises(PlacementError):  # it runs whole on every rank here: unproven too
        compile_plan(model, read(known), batch, loss, strict=True)
