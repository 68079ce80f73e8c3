"""What a plan needs to know about a model: kinds, shapes, ties, heads, packed projections."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autoshard.diagnostics import CaptureError
from autoshard.ir.facts import describe
from autoshard.model_facts import ModelFacts, Packing, Projection

D = 32


class Attention(nn.Module):
    """An attention of one's own: four heads, packed projection, no config anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)


class Model(nn.Module):
    """A model with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, D)
        self.attn = Attention()
        self.norm = nn.LayerNorm(D)
        self.mha = nn.MultiheadAttention(D, 4)
        self.head = nn.Linear(D, 50, bias=False)
        self.head.weight = self.wte.weight
        self.scale = nn.Parameter(torch.ones(D), requires_grad=False)


class Uneven:
    """A configuration whose layers differ, as transformers has them: asking for one width fails."""

    num_attention_heads = 4

    @property
    def head_dim(self) -> int:
        raise RuntimeError("layers differ")


def test_a_configuration_that_differs_by_layer_states_no_heads() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.config = Uneven()
    assert describe(model).num_heads is None


def test_modules_come_in_order_with_kinds_shapes_and_children() -> None:
    facts = describe(Model())
    assert [m.path for m in facts.modules][:5] == ["", "wte", "attn", "attn.qkv", "attn.out"]
    kinds = {module.path: module.kind for module in facts.modules}
    assert (kinds["wte"], kinds["norm"], kinds["attn"]) == ("embedding", "norm", "other")
    assert facts.by_path["attn.qkv"].weight_shape == (3 * D, D)
    assert (facts.by_path["attn.qkv"].out_features, facts.by_path["wte"].in_features) == (3 * D, 50)
    assert facts.by_path["attn"].children == ("qkv", "out")
    assert facts.params["scale"].requires_grad is False


def test_a_tied_weight_has_one_home_and_counts_once() -> None:
    model = Model()
    facts = describe(model)
    assert facts.ties == (("wte.weight", "head.weight"),)
    assert facts.params["head.weight"].home == "wte.weight"
    assert facts.tied_to("head.weight") == ("wte.weight", "head.weight")
    assert facts.num_params == sum(p.numel() for p in model.parameters())


def test_heads_and_packing_are_seen_in_an_attention_without_a_config() -> None:
    facts = describe(Model())
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) == (4, 4, 8)
    assert facts.packed["attn.qkv"] == Packing("concatenated", (D, D, D))
    assert facts.packed["mha.in_proj_weight"] == Packing("concatenated", (D, D, D))
    assert "attn.out" not in facts.packed


def test_the_meta_device_is_fine() -> None:
    with torch.device("meta"):
        model = Model()
    assert describe(model).num_params == describe(Model()).num_params


def test_a_model_without_attention_has_no_heads() -> None:
    facts = describe(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
    assert (facts.num_heads, dict(facts.packed), dict(facts.projections)) == (None, {}, {})
    assert facts.hf_tp_plan == {}


def hugging_face(name: str, **sizes: int) -> ModelFacts:
    """Describe a small model of transformers on the meta device."""
    hf = pytest.importorskip("transformers")
    config = getattr(hf, f"{name}Config")(**sizes)
    head = {"T5": "ForConditionalGeneration", "GPT2": "LMHeadModel"}.get(name, "ForCausalLM")
    with torch.device("meta"):
        return describe(getattr(hf, f"{name}{head}")(config))


def test_gpt2_packs_thirds_in_a_conv1d() -> None:
    facts = hugging_face("GPT2", n_layer=1, n_embd=D, n_head=4)
    assert facts.by_path["transformer.h.0.attn.c_attn"].kind == "conv1d"
    assert facts.by_path["transformer.h.0.attn.c_attn"].out_features == 3 * D
    assert facts.packed["transformer.h.0.attn.c_attn"] == Packing("concatenated", (D, D, D))


def test_bloom_and_gpt_neox_keep_the_parts_of_a_head_together() -> None:
    bloom = hugging_face("Bloom", n_layer=1, hidden_size=D, n_head=4)
    neox = hugging_face(
        "GPTNeoX", num_hidden_layers=1, hidden_size=D, num_attention_heads=4, intermediate_size=D
    )
    for facts in (bloom, neox):
        (packing,) = facts.packed.values()
        assert packing.layout == "interleaved"


def test_grouped_query_attention_has_its_own_count_of_key_value_heads() -> None:
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": D,
        "intermediate_size": D,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    facts = hugging_face("Llama", **sizes)
    layer = "model.layers.0.self_attn"
    assert facts.projections == {
        f"{layer}.q_proj": Projection("query", 8, 4),
        f"{layer}.k_proj": Projection("key", 2, 4),
        f"{layer}.v_proj": Projection("value", 2, 4),
    }
    assert len(facts.hf_tp_plan) == 9
    phi = hugging_face("Phi3", **sizes, pad_token_id=0)
    assert phi.packed["model.layers.0.self_attn.qkv_proj"] == Packing("concatenated", (32, 8, 8))


def test_t5_ties_one_weight_four_times_and_has_wide_heads() -> None:
    facts = hugging_face("T5", d_model=D, num_layers=1, num_heads=4, d_kv=16, d_ff=D)
    assert [len(names) for names in facts.ties] == [4]
    assert facts.projections["encoder.block.0.layer.0.SelfAttention.q"].head_dim == 16


class MultiQuery(nn.Module):
    """Falcon-7B's attention: 4 query heads and one key head, whose name says "interleaved"."""

    def __init__(self, **config: object) -> None:
        super().__init__()
        stated = {"num_attention_heads": 4, "num_kv_heads": 4, "hidden_size": D, **config}
        self.config = type("Config", (), stated)
        self.query_key_value = nn.Linear(D, D + 2 * 8)


def test_multi_query_means_one_key_head_behind_the_queries() -> None:
    facts = describe(MultiQuery(multi_query=True))
    assert facts.num_kv_heads == 1
    assert facts.packed["query_key_value"] == Packing("concatenated", (D, 8, 8))
    grouped = describe(MultiQuery(multi_query=True, new_decoder_architecture=True))
    assert grouped.num_kv_heads == 4 and not grouped.packed


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_a_wrapped_model_is_refused_before_its_paths_match_no_rule(wrap: Callable) -> None:
    with pytest.raises(CaptureError, match="is already wrapped as") as caught:
        describe(wrap(Model()))
    assert caught.value.code == "AS703"
