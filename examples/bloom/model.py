"""BLOOM-176B as it was trained: the real configuration, on the meta device, without a weight.

It is here to be inspected (`autoshard inspect examples/bloom/bloom-176b.plan --model
examples/bloom/model.py:bloom_176b`): no machine at hand has to hold it.
"""

import torch
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM

MICRO_BATCH_SIZE = 2
SEQUENCE_LENGTH = 2048


def bloom_176b() -> tuple[BloomForCausalLM, dict[str, Tensor]]:
    """Return the model and one micro-batch of token ids, both on the meta device."""
    config = BloomConfig(
        vocab_size=250880, hidden_size=14336, n_layer=70, n_head=112, use_cache=False
    )
    with torch.device("meta"):
        model = BloomForCausalLM(config).train()
        tokens = torch.zeros(MICRO_BATCH_SIZE, SEQUENCE_LENGTH, dtype=torch.int64)
    return model, {"input_ids": tokens, "labels": tokens}
