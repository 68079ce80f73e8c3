"""The models that plans are checked against, in their real sizes, on the meta device.

Each function serves `--model tests/dsl/models.py:NAME`; the batch is None: nothing runs it.
"""

from collections.abc import Callable

import torch
import transformers as hf
from torch import nn

Built = tuple[nn.Module, None]


def gpt2() -> Built:
    """GPT-2, 124M."""
    return _meta(lambda: hf.GPT2LMHeadModel(hf.GPT2Config()))


def bloom() -> Built:
    """BLOOM, 176B."""
    config = hf.BloomConfig(vocab_size=250880, hidden_size=14336, n_layer=70, n_head=112)
    return _meta(lambda: hf.BloomForCausalLM(config))


def llama3() -> Built:
    """Llama 3, 70B."""
    config = hf.LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    return _meta(lambda: hf.LlamaForCausalLM(config))


def t5() -> Built:
    """T5-large."""
    config = hf.T5Config(d_model=1024, d_ff=4096, d_kv=64, num_layers=24, num_heads=16)
    return _meta(lambda: hf.T5ForConditionalGeneration(config))


def vit() -> Built:
    """ViT-L/16."""
    config = hf.ViTConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16
    )
    return _meta(lambda: hf.ViTForImageClassification(config))


def _meta(build: Callable[[], nn.Module]) -> Built:
    with torch.device("meta"):
        return build(), None
