"""Shrink the configuration of any transformers family until it is built in a second.

Families spell the same size in many ways (`hidden_size`, `d_model`, `n_embd`, ...). What the
default configuration of a family contains is set to a small value by name, in nested
configurations too; `OVERRIDES` holds what a family needs beyond that.
"""

from __future__ import annotations

from collections.abc import Mapping

WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCAB = 32, 2, 4, 2, 64, 96
POSITIONS, EXPERTS, LABELS, IMAGE, PATCH = 64, 4, 4, 16, 4
HEAD_DIM = WIDTH // HEADS

# value, and the names that take it where the default configuration has an integer there
SIZES = (
    (
        WIDTH,
        """hidden_size d_model n_embd embed_dim dim model_dim embedding_size word_embed_proj_dim
        emb_dim projection_dim decoder_hidden_size attention_hidden_size pooler_hidden_size
        encoder_hidden_size text_hidden_size lru_width decoder_dim n_embed dim_model
        mamba_d_ssm""",
    ),
    (
        LAYERS,
        """num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers
        num_decoder_layers num_encoder_layers num_blocks""",
    ),
    (
        HEADS,
        """num_attention_heads n_head n_heads num_heads encoder_attention_heads
        decoder_attention_heads decoder_num_attention_heads num_encoder_attention_heads
        num_decoder_attention_heads swa_num_attention_heads encoder_num_attention_heads
        linear_num_key_heads linear_num_value_heads""",
    ),
    (
        KV_HEADS,
        """num_key_value_heads num_kv_heads n_kv_heads n_head_kv num_query_groups
        multi_query_group_num num_global_key_value_heads swa_num_key_value_heads""",
    ),
    (
        HIDDEN,
        """intermediate_size d_ff ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim dim_ff
        ffn_hidden_size hidden_dim mlp_dim moe_intermediate_size shared_expert_intermediate_size
        intermediate_size_mlp moe_ffn_hidden_size decoder_intermediate_size block_ff_dim
        shared_intermediate_size expert_ffn_hidden_size dff mamba_intermediate_size""",
    ),
    (VOCAB, "vocab_size n_token decoder_vocab_size encoder_vocab_size"),
    (
        POSITIONS,
        """max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length
        max_seq_length max_source_positions max_target_positions seq_length
        max_encoder_position_embeddings max_decoder_position_embeddings""",
    ),
    (
        HEAD_DIM,
        """head_dim d_kv kv_channels attention_head_size global_head_dim d_head key_head_dim
        value_head_dim linear_key_head_dim linear_value_head_dim swa_head_dim v_head_dim
        qk_nope_head_dim qk_rope_head_dim rotary_dim""",
    ),
    (2 * HEAD_DIM, "qk_head_dim kv_lora_rank q_lora_rank"),
    (EXPERTS, "num_experts num_local_experts n_routed_experts moe_num_experts ffn_num_experts"),
    (2, "num_experts_per_tok moe_k moe_topk top_k_experts experts_per_token"),
    (1, "n_group topk_group first_k_dense_replace n_shared_experts num_shared_experts"),
    (LABELS, "num_labels"),
    (IMAGE, "image_size"),
    (PATCH, "patch_size"),
)
SMALL = {name: value for value, names in SIZES for name in names.split()}
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")

MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_d_state": 8}
HEAD = {"head_dim": HEAD_DIM}
PYRAMID = {"hidden_sizes": [WIDTH // 2, WIDTH], "depths": [1, 1], "patch_size": 2, "num_stages": 2}
WINDOWS = {
    **{"embed_dim": WIDTH // 2, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2},
    **{"patch_size": 2, "drop_path_rate": 0.0},
}
# What a family needs beyond that, or other than that.
OVERRIDES: Mapping[str, Mapping[str, object]] = {
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), MAMBA),
    # sizes whose default is derived from others, or None
    **dict.fromkeys(("ministral", "hunyuan_v1_dense"), HEAD),
    "mamba2": {"num_heads": 2 * HEADS, "head_dim": HEAD_DIM, "n_groups": 1, "state_size": 8},
    "esmc": {"num_key_value_heads": HEADS},
    "esm": {"vocab_size": VOCAB, "mask_token_id": 3, "pad_token_id": 1, "token_dropout": False},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "nemotron": {"num_key_value_heads": KV_HEADS},
    "falcon": {"num_kv_heads": 1},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    # images in several resolutions: a list says the size of each
    **dict.fromkeys(("convnext", "convnextv2"), PYRAMID),
    "resnet": {**PYRAMID, "embedding_size": WIDTH // 2},
    **dict.fromkeys(("swin", "swinv2"), WINDOWS),
    "segformer": {
        **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1]},
        **{"hidden_sizes": [WIDTH // 2, WIDTH], "patch_sizes": [3, 3], "strides": [2, 2]},
        **{"num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "drop_path_rate": 0.0},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": HIDDEN, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    },
    "gemma4": {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": HEAD_DIM},
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": HEAD_DIM},
    "gemma3n_text": {
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": HEAD_DIM,
        "num_kv_shared_layers": 0,
    },
}
EVERYWHERE: Mapping[str, Mapping[str, object]] = {
    "image": {"num_labels": LABELS},
    "seq2seq": {"decoder_start_token_id": 0},
}


def shrink(model_type: str, kind: str, defaults: Mapping[str, object]) -> dict[str, object]:
    """Return the keyword arguments that make a family's configuration small.

    ``defaults`` is the family's default configuration as a dictionary.
    """
    return {
        **_shrunk(defaults),
        **EVERYWHERE.get(kind, {}),
        **OVERRIDES.get(model_type, {}),
    }


def _shrunk(defaults: Mapping[str, object]) -> dict[str, object]:
    kwargs: dict[str, object] = {}
    for name, value in defaults.items():
        small = _small(name, value)
        if small is not None:
            kwargs[name] = small
    if "kv_lora_rank" in defaults and "num_key_value_heads" in kwargs:
        kwargs["num_key_value_heads"] = HEADS  # latent attention: each head has its own
    return kwargs


def _small(name: str, value: object) -> object:
    """Return the small value of one setting, None to keep its default."""
    if isinstance(value, dict) and "model_type" in value:
        return {"model_type": value["model_type"], **_shrunk(value)}
    if name == "use_cache":
        return False
    if isinstance(value, float) and ("drop" in name or "jitter" in name or "pdrop" in name):
        return 0.0
    if name in TOKENS and isinstance(value, int) and value >= VOCAB:
        return TOKENS.index(name)
    return SMALL.get(name) if type(value) is int else None
