"""A rule that is broken in one way fails its property test."""

import pytest

from tests.ir.rule_mutants import MUTATIONS, outcome

# One operator of each family: pointwise, product, reduction, norm, view, lookup, loss, backward.
NAMES = ("aten.add.Tensor", "linear", "softmax", "layer norm", "permute", "embedding")


@pytest.mark.parametrize("name", NAMES)
def test_each_wrong_decision_of_a_rule_is_seen(name: str) -> None:
    """All cases: ``python -m tests.ir.rule_mutants``."""
    found = [outcome(name, mutation) for mutation in MUTATIONS]
    assert "true" not in found and found.count("caught") >= 3
