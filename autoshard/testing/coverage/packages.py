"""Small models of other packages than transformers, where those are installed.

    pip install --no-deps x-transformers torch-einops-utils einops einx loguru frozendict
    pip install --no-deps litgpt lightning lightning-utilities torchmetrics
    pip install --no-deps timm vit-pytorch torchvision pillow

Their loss is the mean square of what they return.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from autoshard.testing.coverage.configs import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    IMAGE,
    KV_HEADS,
    LABELS,
    LAYERS,
    PATCH,
    POSITIONS,
    VOCAB,
    WIDTH,
)

SAMPLES, LENGTH = 4, 12
Built = tuple[nn.Module, Tensor]  # and what its forward takes


def mean_square(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of every model here."""
    return output.pow(2).mean()


def x_transformers() -> Built:
    """Return a decoder with rotary positions, RMSNorm, a gated MLP and grouped queries."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=WIDTH,
        depth=LAYERS,
        heads=HEADS,
        attn_dim_head=HEAD_DIM,
        attn_kv_heads=KV_HEADS,
        rotary_pos_emb=True,
        use_rmsnorm=True,
        ff_glu=True,
    )
    return TransformerWrapper(num_tokens=VOCAB, max_seq_len=POSITIONS, attn_layers=layers), tokens()


def timm_vit() -> Built:
    """Return timm's vision transformer."""
    return _timm("vit_tiny_patch16_224", **TIMM_SIZES), images()


def timm_deit() -> Built:
    """Return timm's DeiT."""
    return _timm("deit_tiny_patch16_224", **TIMM_SIZES), images()


def timm_convnext() -> Built:
    """Return timm's smallest ConvNeXt, with two narrow blocks."""
    return _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)), images(2 * IMAGE)


def litgpt() -> Built:
    """Return litgpt's Pythia: query, key and value packed group by group."""
    from litgpt import GPT, Config

    config = Config.from_name(
        "pythia-14m",
        n_layer=LAYERS,
        n_embd=WIDTH,
        n_head=HEADS,
        intermediate_size=HIDDEN,
        padded_vocab_size=VOCAB,
        block_size=POSITIONS,
    )
    return GPT(config), tokens()


def vit_pytorch() -> Built:
    """Return vit-pytorch's ViT, made of einops layers."""
    from vit_pytorch import ViT

    model = ViT(
        image_size=IMAGE,
        patch_size=PATCH,
        num_classes=LABELS,
        dim=WIDTH,
        depth=LAYERS,
        heads=HEADS,
        dim_head=HEAD_DIM,
        mlp_dim=HIDDEN,
    )
    return model, images()


def torchvision_vit() -> Built:
    """Return torchvision's vision transformer, made of torch's MultiheadAttention."""
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=IMAGE,
        patch_size=PATCH,
        num_layers=LAYERS,
        num_heads=HEADS,
        hidden_dim=WIDTH,
        mlp_dim=HIDDEN,
        num_classes=LABELS,
    )
    nn.init.normal_(model.heads.head.weight)  # zero at first: no gradient would pass
    return model, images()


# name on the page -> the module that must be there, and the builder
PACKAGES: Mapping[str, tuple[str, Callable[[], Built]]] = {
    "x-transformers": ("x_transformers", x_transformers),
    "timm vit": ("timm", timm_vit),
    "timm deit": ("timm", timm_deit),
    "timm convnext": ("timm", timm_convnext),
    "litgpt pythia": ("litgpt", litgpt),
    "vit-pytorch": ("vit_pytorch", vit_pytorch),
    "torchvision vit": ("torchvision", torchvision_vit),
}
TIMM_SIZES = {
    "img_size": IMAGE,
    "patch_size": PATCH,
    "embed_dim": WIDTH,
    "depth": LAYERS,
    "num_heads": HEADS,
}
_library: list[torch.library.Library] = []  # operators live as long as the library that has them


def is_installed(name: str) -> bool:
    """Tell whether the package of a model can be imported."""
    return find_spec(PACKAGES[name][0]) is not None


def tokens() -> Tensor:
    """Return a batch of token ids (SAMPLES, LENGTH)."""
    return torch.randint(VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))


def images(size: int = IMAGE) -> Tensor:
    """Return a batch of images (SAMPLES, 3, size, size)."""
    return torch.randn(SAMPLES, 3, size, size, generator=torch.Generator().manual_seed(1))


def mend_torchvision() -> None:
    """Declare the operators that torchvision's wheel lacks beside a torch for CPUs.

    Where they are missing it can't be imported, nor can timm and the image classes of
    transformers; none of the models here calls one.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return  # isn't installed, or lacks more than operators
    except RuntimeError:
        if not _library:
            _library.append(torch.library.Library("torchvision", "DEF"))
            for name in ("nms", "qnms"):
                _library[0].define(f"{name}(Tensor boxes, Tensor scores, float limit) -> Tensor")


def _timm(name: str, **options: object) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=LABELS, **options)
