"""C5: under sequence parallelism a norm sees 1/tp of the tokens; its gradient must be summed."""

from __future__ import annotations

import pytest

from autoshard.ir.program import Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ops import collectives
from autoshard.testing.models import Built, tiny_gpt, tiny_hf
from autoshard.testing.plans import Layout, plan_text
from tests.bank.equal import assert_equal, finding

LAYOUT = Layout(tp=2, sequence=True)
STEPS = 20


def built(family: str) -> Built:
    """Return a model with LayerNorm or, in Llama, RMSNorm."""
    sizes = {"batch": 2, "length": 8, "heads": 4}
    return tiny_gpt(**sizes) if family == "tiny_gpt" else tiny_hf(family, **sizes)


def plan(family: str) -> str:
    return plan_text(family, LAYOUT).removeprefix("autoshard 1\n")


@pytest.mark.parametrize("family", ["tiny_gpt", "llama"])
def test_norms_on_token_shards_train_as_whole_ones(family: str) -> None:
    """TRAJ; lock step checks bit by bit that all ranks hold the same norms after each step."""
    assert_equal(built(family), plan(family), steps=STEPS, plain=False)


@pytest.mark.parametrize("family", ["tiny_gpt", "llama"])
def test_a_norm_whose_gradient_is_not_summed_is_seen(family: str) -> None:
    def forget_the_sum(program: Program) -> bool:
        function = program.stages[0].phases["I"]
        sums = collectives.all_reduce_start
        (start,) = function.graph.find_nodes(op="call_function", target=sums)
        (wait,) = start.users
        Rewriter(function, "fault").replace(wait, start.args[0])
        function.graph.erase_node(start)
        return True

    seen = finding(built(family), plan(family), forget_the_sum)
    assert "norm" in seen or "ln_" in seen
    assert "ranks" in seen or seen.startswith("grad")
