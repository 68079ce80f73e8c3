"""The placement rules beside DTensor's propagation, on operators that both know."""

from __future__ import annotations

import pytest
import torch

from autoshard.ir.rules import table
from tests.ir import rule_mutants
from tests.ir.dtensor_oracle import both
from tests.ir.test_rules import CASES


def test_dtensor_says_the_same_of_operators_that_it_knows() -> None:
    """Each eighth case here; ``python -m tests.ir.dtensor_oracle`` asks about all."""
    found = [opinion for name in list(CASES)[::8] for opinion in both(name)]
    assert [opinion for opinion in found if opinion.ours != opinion.theirs] == []
    assert len(found) > 100 and len({opinion.op for opinion in found}) > 30


def test_dtensor_contradicts_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    op = torch.ops.aten.mm.default
    rule = table.RULES[op]

    def wrong(call, ins):
        return rule_mutants.pass_sums_as_whole(call, ins, rule(call, ins))

    monkeypatch.setitem(table.RULES, op, wrong)
    name = next(name for name in CASES if CASES[name]()[0] is op)
    assert any(opinion.ours != opinion.theirs for opinion in both(name))
