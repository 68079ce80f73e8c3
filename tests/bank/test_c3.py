"""C3: more ranks than key heads are refused with the heads and the degrees that work."""

from autoshard.testing.models import Built, tiny_hf
from tests.bank.equal import assert_equal, refusal

PLAN = """
mesh {{ tp = {tp} }}
batch {{ micro_batch_size = 2 }}
tensor {{
  model.layers.* {{ self_attn.{{k,v}}_proj: {style}, self_attn.{{q}}_proj: colwise, \
self_attn.o_proj: rowwise }}
}}
"""


def llama() -> Built:
    """Return a Llama of four query heads and two key heads."""
    return tiny_hf("llama", layers=1, heads=4, kv_heads=2, batch=2)


def test_two_key_heads_on_four_ranks_are_refused_with_the_way_out() -> None:
    text = refusal(llama(), PLAN.format(tp=4, style="colwise"))
    assert text.splitlines()[0] == "error[AS402]: 2 key/value heads can't be split over tp = 4"
    assert " --> case.plan:5:20" in text
    assert "model.layers.0.self_attn.k_proj: 2 heads x 8" in text
    assert "= help: `colwise(replicate=2)` keeps each head on 2 ranks" in text
    assert "= note: query heads (4) do divide by 4" in text


def test_key_heads_on_several_ranks_are_refused_while_they_are_planned() -> None:
    text = refusal(llama(), PLAN.format(tp=4, style="colwise(replicate=2)"))
    assert "planned, not executable yet: tensor style `colwise(replicate=2)`" in text


def test_two_key_heads_on_two_ranks_train_as_one_process_does() -> None:
    assert_equal(llama(), PLAN.format(tp=2, style="colwise"))
