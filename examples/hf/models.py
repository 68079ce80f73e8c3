"""Small GPT-2, BLOOM and Llama from their configurations: nothing is downloaded.

Each builder returns a model and one micro-batch; the models compute their own loss from `labels`.
Eight heads (Llama: four key/value heads) divide by every `tp` of the plans beside this file.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

VOCAB = 256
CONTEXT = 64
WIDTH = 64
LAYERS = 4
HEADS = 8
MICRO_BATCH_SIZE = 4

Built = tuple[PreTrainedModel, Mapping[str, Tensor]]


def gpt2() -> Built:
    """Return GPT-2: learned positions, `Conv1D` layers, packed q | k | v, tied head."""
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=CONTEXT,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return _seeded(GPT2LMHeadModel, config)


def bloom() -> Built:
    """Return BLOOM: ALiBi instead of positions, a normalised embedding, q, k, v packed by head."""
    config = BloomConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, use_cache=False
    )
    return _seeded(BloomForCausalLM, config)


def llama() -> Built:
    """Return Llama: rotary positions, grouped queries, RMSNorm, gated MLP, untied head."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )
    return _seeded(LlamaForCausalLM, config)


BUILDERS = {"gpt2": gpt2, "bloom": bloom, "llama": llama}


def _seeded(kind: type[PreTrainedModel], config: object) -> Built:
    torch.manual_seed(0)
    model = kind(config).train()
    tokens = torch.randint(VOCAB, (MICRO_BATCH_SIZE, CONTEXT))
    return model, {"input_ids": tokens, "labels": tokens}
