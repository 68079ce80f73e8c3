"""Build a small model and a batch of any transformers family, from its configuration alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autoshard.testing.coverage.configs import EXPERTS, LABELS, VOCAB, shrink
from autoshard.testing.coverage.packages import (
    PACKAGES,
    is_installed,
    mean_square,
    mend_torchvision,
)

SAMPLES, LENGTH = 4, 12
EXPERTS_AS = "batched_mm"  # as dense products: a fixed program can't sort tokens by expert
LARGEST = 3_000_000  # parameters: a family that stays larger could not be shrunk
# kind -> the automatic class and the table of the families that it builds; the first one wins
KINDS: Mapping[str, tuple[str, str]] = {
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "image": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
}
PACKAGE = "package"  # the kind of what comes from other packages
# Families that are decoders in one table but are known for something else.
PREFERRED: Mapping[str, str] = {
    **dict.fromkeys(("bert", "roberta", "electra", "camembert", "xlm-roberta", "ernie"), "masked"),
    **dict.fromkeys(("bart", "mbart", "pegasus", "marian", "mvp", "plbart"), "seq2seq"),
}


class NotBuiltError(Exception):
    """Say why a family can't be built small, offline."""


@dataclass(frozen=True)
class Family:
    """Name a transformers model type and the automatic class that builds it, or a PACKAGE."""

    name: str
    kind: str


@dataclass(frozen=True)
class Sample:
    """Hold a built model and the global batch it is measured on."""

    model: nn.Module
    batch: dict[str, Tensor]
    loss: Callable[..., Tensor] | None = None  # None: the model's own


def families() -> tuple[Family, ...]:
    """Return every family of the tables of ``KINDS``, each once, by kind and name."""
    mend_torchvision()
    from transformers.models.auto import modeling_auto

    found: dict[str, Family] = {}
    for kind, (_, table) in KINDS.items():
        for name in getattr(modeling_auto, table):
            if PREFERRED.get(name, kind) == kind:
                found.setdefault(name, Family(name, kind))
    order = list(KINDS)
    ours = sorted(found.values(), key=lambda f: (order.index(f.kind), f.name))
    return (*ours, *(Family(name, PACKAGE) for name in PACKAGES))


def build(family: Family, seed: int = 0) -> Sample:
    """Return a small model of ``family`` in train mode, and its batch.

    Raises NotBuiltError with the reason that its package gives.
    """
    mend_torchvision()
    return _packaged(family, seed) if family.kind == PACKAGE else _configured(family, seed)


def _packaged(family: Family, seed: int) -> Sample:
    module, make = PACKAGES[family.name]
    if not is_installed(family.name):
        raise NotBuiltError(f"`{module}` isn't installed")
    torch.manual_seed(seed)
    model, x = make()
    name = next(iter(inspect.signature(model.forward).parameters))
    return Sample(model.train(), {name: x}, mean_square)


def _configured(family: Family, seed: int) -> Sample:
    import transformers

    auto = getattr(transformers, KINDS[family.kind][0])
    try:
        defaults = transformers.AutoConfig.for_model(family.name).to_dict()
        small = shrink(family.name, family.kind, defaults)
        config = transformers.AutoConfig.for_model(family.name, **small)
        with torch.device("meta"):
            elements = sum(p.numel() for p in auto.from_config(config).parameters())
        if elements > LARGEST:
            raise NotBuiltError(f"stays at {elements:,} parameters")
        torch.manual_seed(seed)
        model = auto.from_config(config).train()
        if model._can_set_experts_implementation():
            model.set_experts_implementation(EXPERTS_AS)
        batch = _batch(family.kind, config)
        _check_runs(model, batch)
    except NotBuiltError:
        raise
    except Exception as error:
        line = next((s for s in str(error).splitlines()[1:] or [str(error)] if s.strip()), "")
        raise NotBuiltError(f"{type(error).__name__}: {line.strip()[:160]}") from error
    return Sample(model, batch)


def _batch(kind: str, config: object) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    if kind == "image":
        vision = getattr(config, "vision_config", config)
        channels = getattr(vision, "num_channels", 3)
        size = getattr(vision, "image_size", 32)
        size = size if isinstance(size, int) else size[0]
        pixels = torch.randn(SAMPLES, channels, size, size, generator=draw)
        return {"pixel_values": pixels, "labels": torch.arange(SAMPLES) % LABELS}
    ids = torch.randint(EXPERTS, VOCAB - EXPERTS, (SAMPLES, LENGTH), generator=draw)
    labels = torch.randint(EXPERTS, VOCAB - EXPERTS, (SAMPLES, LENGTH), generator=draw)
    labels[torch.rand(SAMPLES, LENGTH, generator=draw) < 0.2] = -100
    labels[:, 1] = ids[:, 1]
    batch = {"input_ids": ids, "labels": labels}
    # Switch and LongT5 make this default themselves, but not while they are exported.
    return {**batch, "attention_mask": torch.ones_like(ids)} if kind == "seq2seq" else batch


def _check_runs(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    loss = getattr(model(**batch), "loss", None)
    if loss is None:
        raise NotBuiltError("computes no loss from labels")
    if not torch.isfinite(loss):
        raise NotBuiltError(f"its own loss is {loss.item()}")
