"""P9: a weight tied over stages has one gradient, one norm and one value, for twenty steps."""

from autoshard.ir.graph_function import BOUNDARY
from autoshard.ir.program import Program
from autoshard.testing.models import tiny_hf
from autoshard.testing.mutants import named
from tests.bank.equal import assert_equal, finding

STEPS = 20
PLAN = """
mesh {{ pp = {stages} }}
batch {{ micro_batch_size = 2, num_microbatches = 2 }}
pipeline {{ split = before({cut}) }}
"""
GPT2 = PLAN.format(stages=2, cut="transformer.h.1")
T5 = PLAN.format(stages=3, cut="decoder, decoder.block.1")


def test_gpt2_with_its_embedding_on_both_ends_trains_as_one_process_does() -> None:
    """Replicas are compared bit by bit in each step, where global values are put together."""
    found = assert_equal(tiny_hf("gpt2", layers=2, heads=4), GPT2, steps=STEPS)
    assert len(found.ours) == STEPS and found.ours[0].norm > 1  # clipping had something to do


def test_t5_with_three_names_for_one_weight_trains_as_one_process_does() -> None:
    """All three stages read the weight: the encoder, the first decoder block, the head."""
    built = tiny_hf("t5", layers=2, heads=4)
    names = {
        n
        for n, p in built[0].named_parameters(remove_duplicate=False)
        if p is built[0].shared.weight
    }
    assert len(names) >= 3
    programs: list[Program] = []
    found = assert_equal(built, T5, steps=2, mutate=programs.append)
    assert len(names & set(found.ours[0].grads)) == 1
    assert programs[0].params["shared.weight"].homes == (0, 1, 2)
    for stage in programs[0].stages[1:]:  # what the encoder made comes once to each decoder stage
        arriving = list(stage.phases["F"].named(BOUNDARY))
        assert [n for n in arriving if n.startswith("encoder")] == ["encoder.final_layer_norm"]


def test_a_stage_that_keeps_its_own_gradient_would_be_seen() -> None:
    text = finding(tiny_hf("gpt2", layers=2, heads=4), GPT2, named("lose-tied-gradient").plant)
    assert "ranks 0 and 1 hold different" in text
