"""The Hugging Face examples build offline, small, and with heads that divide."""

import pytest

pytest.importorskip("transformers")

from tests.examples.loading import load

models = load("hf/models")


@pytest.mark.parametrize("name", models.BUILDERS)
def test_a_model_computes_its_own_loss_and_every_gradient(name: str) -> None:
    model, batch = models.BUILDERS[name]()
    loss = model(**batch).loss
    loss.backward()
    assert loss.item() == pytest.approx(5.55, abs=0.2)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", models.BUILDERS)
def test_eight_heads_divide_by_every_tp_of_the_plans(name: str) -> None:
    config = models.BUILDERS[name]()[0].config
    assert config.num_attention_heads == 8
    assert getattr(config, "num_key_value_heads", 8) % 4 == 0


def test_the_real_bloom_is_built_without_a_single_weight() -> None:
    model, batch = load("bloom/model").bloom_176b()
    assert sum(parameter.numel() for parameter in model.parameters()) == 176_247_271_424
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert tuple(batch["input_ids"].shape) == (2, 2048)
