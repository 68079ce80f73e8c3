"""C3: more ranks than key heads are refused with the heads and the degrees that work."""

from autoshard.ir.program import Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ops.collectives import all_reduce_within
from autoshard.testing.models import Built, tiny_hf
from tests.bank.equal import assert_equal, finding, refusal


def forget_sharing(program: Program) -> bool:
    """Let each rank keep its own gradient of a head that it shares."""
    found = False
    for function in program.stages[0].phases.values():
        for node in function.graph.find_nodes(op="call_function", target=all_reduce_within):
            Rewriter(function, "fault").replace(node, node.args[0])
            found = True
    return found


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


def test_two_key_heads_kept_on_two_of_four_ranks_each_train_as_one_process_does() -> None:
    found = assert_equal(llama(), PLAN.format(tp=4, style="colwise(replicate=2)"))
    assert found.ours[0].grads["model.layers.0.self_attn.k_proj.weight"].shape == (16, 32)


def test_key_heads_whose_gradients_are_not_shared_would_be_seen() -> None:
    text = finding(llama(), PLAN.format(tp=4, style="colwise(replicate=2)"), forget_sharing)
    assert "ranks that keep the same head of 'model.layers.0.self_attn.k_proj.weight'" in text


def test_two_key_heads_on_two_ranks_train_as_one_process_does() -> None:
    assert_equal(llama(), PLAN.format(tp=2, style="colwise"))
