"""P9: a weight tied over stages has one gradient, one norm and one value, for twenty steps."""

from autoshard.testing.models import tiny_hf
from autoshard.testing.mutants import named
from tests.bank.equal import assert_equal, finding

STEPS = 20
PLAN = """
mesh {{ pp = 2 }}
batch {{ micro_batch_size = 2, num_microbatches = 2 }}
pipeline {{ split = before({cut}) }}
"""
GPT2 = PLAN.format(cut="transformer.h.1")
T5 = PLAN.format(cut="decoder")


def test_gpt2_with_its_embedding_on_both_ends_trains_as_one_process_does() -> None:
    """Replicas are compared bit by bit in each step, where global values are put together."""
    found = assert_equal(tiny_hf("gpt2", layers=2, heads=4), GPT2, steps=STEPS)
    assert len(found.ours) == STEPS and found.ours[0].norm > 1  # clipping had something to do


def test_t5_with_three_names_for_one_weight_trains_as_one_process_does() -> None:
    built = tiny_hf("t5", layers=1, heads=4)
    names = {
        n
        for n, p in built[0].named_parameters(remove_duplicate=False)
        if p is built[0].shared.weight
    }
    assert len(names) >= 3
    found = assert_equal(built, T5, steps=STEPS)
    assert len(names & set(found.ours[0].grads)) == 1


def test_a_stage_that_keeps_its_own_gradient_would_be_seen() -> None:
    text = finding(tiny_hf("gpt2", layers=2, heads=4), GPT2, named("lose-tied-gradient").plant)
    assert "ranks 0 and 1 hold different" in text
