"""The tensor passes together: a split model equals itself on one rank, in float64."""

from __future__ import annotations

import pytest
import torch

from autoshard.ops import collectives
from autoshard.testing.models import tiny_gpt, tiny_hf
from tests.passes.plans import RULES
from tests.passes.tensor_parallel import (
    apply_passes,
    assert_equal,
    captured,
    compiled,
    count_collectives,
    reference,
    run_ranks,
)

LAYERS = 2
FAMILIES = ("gpt2", "bloom", "llama", "opt", "bert")


def built(name: str, **sizes: object) -> tuple:
    return tiny_gpt(**sizes) if name == "gpt" else tiny_hf(name, **sizes)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", ["gpt", *FAMILIES, "t5"])
def test_a_split_model_equals_itself_on_one_rank(name: str, tp: int) -> None:
    model, batch, loss = built(name, batch=2, length=8)
    assert_equal(model, batch, RULES[name], tp, loss)


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "bert"])
def test_eager_attention_is_split_like_the_fused_one(name: str) -> None:
    model, batch, _ = tiny_hf(name, batch=2, length=8, attention="eager")
    assert_equal(model, batch, RULES[name])


@pytest.mark.parametrize("name", ["bloom", "opt", "bert"])
def test_a_block_needs_two_all_reduces_each_way(name: str) -> None:
    """The embedding adds one forward, the head one backward; a copy_to is one backward."""
    model, batch, loss = built(name, batch=2, length=8)
    program, _ = compiled(model, batch, RULES[name], loss=loss)
    counts = count_collectives(program)
    assert counts["all_reduce"] == 2 * LAYERS + 1
    assert counts["copy_to"] == 2 * LAYERS + 1
    assert counts["all_gather"] == counts["reduce_scatter"] == 0
    assert counts["shard"] == (name == "bloom")  # ALiBi slopes, once for all layers


@pytest.mark.parametrize("tp", [2, 4])
def test_a_padded_vocabulary_changes_nothing(tp: int) -> None:
    model, batch, loss = tiny_gpt(vocab=97, batch=2, length=8)
    rules = {**RULES["gpt"], "wte": "vocab(pad=8)", "head": "vocab(pad=8)"}
    program = assert_equal(model, batch, rules, tp, loss)
    spec = program.params["wte.weight"]
    assert spec.shape == (97, 32)
    assert spec.padded == (97 + -97 % (8 * tp), 32)


def test_dropout_draws_one_mask_for_all_ranks() -> None:
    """Residual dropout is replicated, attention dropout is split: both as on one rank."""
    model, batch, loss = tiny_gpt(dropout=0.5, batch=2, length=8)
    assert_equal(model, batch, RULES["gpt"], loss=loss)


@pytest.mark.parametrize("op", ["copy_to", "all_reduce"])
def test_a_lost_collective_is_seen_by_these_tests(op: str) -> None:
    """Plant the fault these tests are there for: remove one collective and expect a difference."""
    model, batch, loss = tiny_gpt(batch=2, length=8)
    model = model.double()
    program = captured(model, batch, 2, loss)
    whole = reference(program, model, batch)
    apply_passes(program, model, RULES["gpt"])
    found = program.forward.graph.find_nodes(op="call_function", target=getattr(collectives, op))
    victim = found[1]
    victim.replace_all_uses_with(victim.args[0])
    program.forward.graph.erase_node(victim)
    got = run_ranks(program, model, batch, 2)[0]
    name = "h.0.ln_1.weight"
    assert not torch.allclose(got.grads[name], whole.grads[name], rtol=1e-6)
