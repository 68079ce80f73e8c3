"""T5: rotary tables that several stages need are made where they are read, and never trained."""

import pytest
import torch

from autoshard.frontend import compile_plan
from autoshard.ir.graph_function import BOUNDARY, TANGENT
from autoshard.testing.models import Built, tiny_hf
from tests.bank.equal import assert_equal, finding, is_call, read, tamper
from tests.bank.models import rotary_toy

aten = torch.ops.aten
PLAN = """
mesh {{ pp = 2 }}
batch {{ micro_batch_size = 2, num_microbatches = 2 }}
pipeline {{ split = before({cut}) }}
"""
LLAMA = PLAN.format(cut="model.layers.2")


def smol_lm() -> Built:
    """Return a model shaped as SmolLM is: three query heads to a key head, tied embeddings."""
    model, batch, loss = tiny_hf("llama", layers=3, width=36, heads=9, kv_heads=3)
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    return model, batch, loss


def llama() -> Built:
    return tiny_hf("llama", layers=3, heads=4, kv_heads=2)


@pytest.mark.parametrize("build", [llama, smol_lm])
def test_llamas_cut_in_the_middle_train_as_one_process_does(build) -> None:
    assert_equal(build(), LLAMA)


def test_a_rotary_module_called_in_both_stages_is_no_obstacle() -> None:
    assert_equal(rotary_toy(table=False), PLAN.format(cut="blocks.2"), plain=False)


@pytest.mark.parametrize("build", [llama, lambda: rotary_toy(table=False)], ids=["llama", "toy"])
def test_only_the_residual_stream_crosses_and_nothing_else_gets_a_gradient(build) -> None:
    model, batch, loss = build()
    cut = "model.layers.2" if hasattr(model, "lm_head") else "blocks.2"
    program = compile_plan(model, read(PLAN.format(cut=cut)), batch, loss).program
    phases = program.stages[1].phases
    width = next(model.parameters()).shape[-1]
    crossing = phases["F"].named(BOUNDARY).values()
    assert {tuple(node.meta["val"].shape) for node in crossing} == {(2, 16, width)}
    assert phases["I"].named_results(TANGENT).keys() == phases["F"].named(BOUNDARY).keys()
    trained = {name for name, _ in model.named_parameters()}
    assert {spec.fqn for spec in program.params.trainable()} == trained


def test_a_wrong_table_in_the_second_stage_would_be_seen() -> None:
    def fault(program) -> bool:
        return tamper(program, 1, "F", is_call(aten.cos.default), aten.neg.default)

    assert finding(llama(), LLAMA, fault) == "loss"
