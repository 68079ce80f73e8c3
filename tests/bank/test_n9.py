"""N9: a plain `nn.Sequential` of MLP blocks, under the rules that its own graph gives."""

import pytest
import torch
from torch import nn

from autoshard.dsl.draft_rules import proposed_rules
from autoshard.dsl.load import load
from autoshard.ir.capture import capture
from autoshard.ir.facts import describe
from autoshard.ir.propose import propose
from autoshard.mesh import Mesh
from autoshard.source import Source
from autoshard.testing.equivalence import TOLERANCE, compare_plan

LAYOUTS = {
    "tp2": "mesh { tp = 2 }\nbatch { micro_batch_size = 4 }",
    "pp2": "mesh { pp = 2 }\nbatch { micro_batch_size = 2, num_microbatches = 2 }",
    "zero3": "mesh { dp = 2 }\nbatch { micro_batch_size = 2 }\nzero { stage = 3 }",
    "tp2 x pp2": "mesh { pp = 2, tp = 2 }\nbatch { micro_batch_size = 2, num_microbatches = 2 }",
}


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8))


def square(output: torch.Tensor, batch: object) -> torch.Tensor:
    return output.pow(2).mean()


@pytest.fixture(scope="module")
def built() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(4))), (torch.randn(4, 8),)


@pytest.fixture(scope="module")
def rules(built: tuple) -> str:
    model, batch = built
    program = capture(model, batch, square, mesh=Mesh(()), compare=False)
    return "\n".join(proposed_rules(describe(model), propose(program, 2)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_as_plain_pytorch_does(built: tuple, rules: str, layout: str) -> None:
    tensor = f"tensor {{\n{rules}\n}}" if "tp" in layout else ""
    plan = load(Source(layout, f"autoshard 1\n{LAYOUTS[layout]}\n{tensor}\n")).require()
    model, batch = built
    comparison = compare_plan(model, plan, batch, square)
    assert comparison.first_wrong(TOLERANCE) is None, comparison.worst


def test_its_blocks_are_one_rule_for_each_side(rules: str) -> None:
    said = [rule for rule in rules.splitlines() if not rule.startswith("#")]
    assert said == ["*.0: colwise", "*.2: rowwise"]
