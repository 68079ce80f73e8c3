"""Calls of losses, convolutions, factories and of what only lowered graphs have; see rule_cases."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autoshard.ir.rules.pointwise import overloads
from tests.ir.rule_cases import Case, f, flags, inside, ints, on, same

aten = torch.ops.aten
ours = torch.ops.autoshard
NONE, MEAN, SUM = REDUCTIONS = 0, 1, 2  # torch's numbers for `reduction`


def rows() -> torch.Tensor:
    return f(4, 8)


def chances() -> torch.Tensor:
    return f(4, 8).sigmoid()


def classes() -> torch.Tensor:
    """Return targets, one of which is ignored."""
    return ints(8, 4).index_fill(0, torch.tensor([1]), -100)


def weights() -> torch.Tensor:
    return f(8).abs()


def maps() -> torch.Tensor:
    return f(4, 8, 2, 3)


def loss(name: str, *args: Callable[[], object], after: tuple = ()) -> dict[str, Case]:
    """Return a case of a loss for each reduction."""
    (op,) = overloads(name)
    return {
        f"{name} {reduction}": lambda r=reduction: (op, *(a() for a in args), r, *after)
        for reduction in REDUCTIONS
    }


def loss_backward(name: str, *args: Callable[[], object], after: tuple = ()) -> dict[str, Case]:
    """Return a case of a loss's backward for each reduction: the gradient is a row or a number."""
    (op,) = overloads(name)
    return {
        f"{name} {r}": lambda r=r: (
            op, rows() if r == NONE else f(), *(a() for a in args), r, *after
        )
        for r in REDUCTIONS
    }  # fmt: skip


def nll_backward(reduction: int) -> Case:
    return lambda: (
        aten.nll_loss_backward.default, f(4) if reduction == NONE else f(), rows(), classes(),
        weights(), reduction, -100, f().abs() + 1,
    )  # fmt: skip


LOSSES: dict[str, Case] = {
    **loss("cross_entropy_loss.default", rows, classes, lambda: None),
    **loss("nll_loss_nd.default", rows, classes, lambda: None),
    **loss("nll_loss.default", rows, classes, weights),
    **loss("mse_loss.default", rows, rows),
    **loss("l1_loss.default", rows, rows),
    **loss("smooth_l1_loss.default", rows, rows),
    **loss("huber_loss.default", rows, rows),
    **loss("kl_div.default", rows, chances),
    **loss("binary_cross_entropy.default", chances, chances, weights),
    **loss("binary_cross_entropy_with_logits.default", rows, chances, weights, weights),
    **loss("margin_ranking_loss.default", rows, rows, rows, lambda: 0.5),
    **loss("cosine_embedding_loss.default", rows, rows, lambda: f(4).sign(), lambda: 0.1),
    **loss("nll_loss_forward.default", rows, classes, weights, after=(-100,)),
    **loss_backward("mse_loss_backward.default", rows, rows),
    **loss_backward("smooth_l1_loss_backward.default", rows, rows, after=(1.0,)),
    **loss_backward("huber_loss_backward.default", rows, rows, after=(1.0,)),
    **{f"nll backward {r}": nll_backward(r) for r in REDUCTIONS},
    "binary cross entropy backward": lambda: (
        aten.binary_cross_entropy_backward.default, f(), chances(), chances(), weights(), SUM
    ),
    "mean binary cross entropy backward": lambda: (
        aten.binary_cross_entropy_backward.default, f(), chances(), chances()
    ),
    "weighted cross entropy": lambda: (
        aten.cross_entropy_loss.default, rows(), classes(), weights(), SUM
    ),
    "cross entropy of probabilities": lambda: (
        aten.cross_entropy_loss.default, rows(), rows().softmax(-1), None, SUM
    ),
    "smoothed cross entropy of maps": lambda: (
        aten.cross_entropy_loss.default, maps(), ints(8, 4, 2, 3), None, SUM, -100, 0.1
    ),
    "cosine similarity": lambda: (aten.cosine_similarity.default, f(4, 8), f(1, 8), -1),
    "nll of maps": lambda: (
        aten.nll_loss2d_forward.default, maps(), ints(8, 4, 2, 3), None, SUM, -100
    ),
    "nll backward of maps": lambda: (
        aten.nll_loss2d_backward.default, f(), maps(), ints(8, 4, 2, 3), None, SUM, -100, f()
    ),
}  # fmt: skip


def convolve(name: str, *, space: int, channels: tuple[int, int] = (8, 2)) -> Case:
    """Return a convolution of 4 samples with 2 channels; ``channels`` are the weight's first."""
    (op,) = overloads(name)
    return lambda: (op, f(4, 2, *(3,) * space), f(*channels, *(2,) * space), f(8))


def convolution_backward(transposed: bool) -> Case:
    """Return the backward of a convolution of 4 x 2 channels to 8."""
    length, weight = (4, (2, 8, 2)) if transposed else (2, (8, 2, 2))
    return lambda: (
        aten.convolution_backward.default, f(4, 8, length), f(4, 2, 3), f(*weight), [8],
        [1], [0], [1], transposed, [0], 1, [True, True, True],
    )  # fmt: skip


def pooled(op: object, *args: object, length: int = 4) -> Case:
    return lambda: (op, f(4, 8, length), *args)


def pooled_2d(op: object, *args: object) -> Case:
    return lambda: (op, f(4, 8, 4, 4), *args)


def pool_with_indices() -> tuple:
    x = f(4, 8, 4, 4)
    indices = aten.max_pool2d_with_indices.default(x, [2, 2])[1]
    op = aten.max_pool2d_with_indices_backward.default
    return op, f(4, 8, 2, 2), x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices


CONVOLUTIONS: dict[str, Case] = {
    "conv1d": convolve("conv1d.default", space=1),
    "conv2d": convolve("conv2d.default", space=2),
    "conv3d": convolve("conv3d.default", space=3),
    "padded conv1d": lambda: (aten.conv1d.padding, f(4, 2, 3), f(8, 2, 3), f(8), [1], "same"),
    "padded conv2d": lambda: (
        aten.conv2d.padding, f(4, 2, 3, 3), f(8, 2, 3, 3), f(8), [1, 1], "same"
    ),
    "grouped conv": lambda: (aten.conv1d.default, f(4, 8, 3), f(8, 4, 2), f(8), [1], [0], [1], 2),
    "transposed conv1d": convolve("conv_transpose1d.default", space=1, channels=(2, 8)),
    "transposed conv2d": convolve("conv_transpose2d.input", space=2, channels=(2, 8)),
    "transposed conv3d": convolve("conv_transpose3d.input", space=3, channels=(2, 8)),
    "convolution": lambda: (
        aten.convolution.default, f(4, 2, 3), f(8, 2, 2), f(8), [1], [0], [1], False, [0], 1
    ),
    "transposed convolution": lambda: (
        aten.convolution.default, f(4, 2, 3), f(2, 8, 2), f(8), [1], [0], [1], True, [0], 1
    ),
    "convolution backward": convolution_backward(False),
    "transposed convolution backward": convolution_backward(True),
    "avg pool 1d": pooled(aten.avg_pool1d.default, [2]),
    "max pool 1d": pooled(aten.max_pool1d.default, [2]),
    "adaptive pool 1d": pooled(aten.adaptive_avg_pool1d.default, [2]),
    "avg pool 2d": pooled_2d(aten.avg_pool2d.default, [2, 2]),
    "avg pool 2d of one sample": lambda: (aten.avg_pool2d.default, f(4, 8, 8), [2, 2]),
    "max pool 2d": pooled_2d(aten.max_pool2d.default, [2, 2]),
    "max pool with indices": pooled_2d(aten.max_pool2d_with_indices.default, [2, 2]),
    "adaptive pool 2d": pooled_2d(aten.adaptive_avg_pool2d.default, [2, 2]),
    "lowered adaptive pool": pooled_2d(aten._adaptive_avg_pool2d.default, [2, 2]),
    "bilinear": pooled_2d(aten.upsample_bilinear2d.vec, [8, 8], False, None),
    "bicubic": pooled_2d(aten.upsample_bicubic2d.vec, [8, 8], False, None),
    "nearest 2d": pooled_2d(aten.upsample_nearest2d.vec, [8, 8], None),
    "linear 1d": pooled(aten.upsample_linear1d.vec, [8], False, None),
    "nearest 1d": pooled(aten.upsample_nearest1d.vec, [8], None),
    "lowered linear 1d": pooled(aten.upsample_linear1d.default, [8], False),
    "lowered nearest 1d": pooled(aten.upsample_nearest1d.default, [8]),
    "lowered nearest 2d": pooled_2d(aten.upsample_nearest2d.default, [8, 8]),
    "lowered bilinear": pooled_2d(aten.upsample_bilinear2d.default, [8, 8], False),
    "lowered bicubic": pooled_2d(aten.upsample_bicubic2d.default, [8, 8], False),
    "avg pool backward": lambda: (
        aten.avg_pool2d_backward.default, f(4, 8, 2, 2), f(4, 8, 4, 4), [2, 2], [2, 2], [0, 0],
        False, True, None,
    ),
    "max pool backward": pool_with_indices,
    "adaptive pool backward": lambda: (
        aten._adaptive_avg_pool2d_backward.default, f(4, 8, 2, 2), f(4, 8, 4, 4)
    ),
    "linear 1d backward": lambda: (
        aten.upsample_linear1d_backward.default, f(4, 8, 8), [8], [4, 8, 4], False
    ),
    "nearest 1d backward": lambda: (
        aten.upsample_nearest1d_backward.default, f(4, 8, 8), [8], [4, 8, 4]
    ),
    "nearest 2d backward": lambda: (
        aten.upsample_nearest2d_backward.default, f(4, 8, 8, 8), [8, 8], [4, 8, 4, 4]
    ),
    "bilinear backward": lambda: (
        aten.upsample_bilinear2d_backward.default, f(4, 8, 8, 8), [8, 8], [4, 8, 4, 4], False
    ),
    "bicubic backward": lambda: (
        aten.upsample_bicubic2d_backward.default, f(4, 8, 8, 8), [8, 8], [4, 8, 4, 4], False
    ),
    "reflection pad backward": lambda: (
        aten.reflection_pad1d_backward.default, f(4, 8, 7), f(4, 8, 4), [1, 2]
    ),
    "reflection pad 2d backward": lambda: (
        aten.reflection_pad2d_backward.default, f(4, 8, 4, 7), f(4, 8, 4, 4), [1, 2, 0, 0]
    ),
}  # fmt: skip


def flash(mask: bool) -> Case:
    """Return the fused attention of the CPU."""
    given = {"attn_mask": f(2, 1, 2, 2)} if mask else {}
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    return lambda: (op, *(f(2, 4, 2, 8) for _ in range(3)), given)


def flash_backward(mask: bool) -> Case:
    """Return its backward, of a forward that was run."""
    op = aten._scaled_dot_product_flash_attention_for_cpu

    def make() -> tuple:
        given = {"attn_mask": f(2, 1, 2, 2)} if mask else {}
        q, k, v = (f(2, 4, 2, 8) for _ in range(3))
        out, lse = op.default(q, k, v, **given)
        back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return back, f(*out.shape), q, k, v, out, lse, 0.0, False, given

    return make


def norm_backward(norm: object, backward: object, tail: tuple, *, fused: bool) -> Case:
    """Return the backward of a norm over the last dim, of a forward that was run."""

    def make() -> tuple:
        x, weight = f(2, 4, 8), f(8)
        given = (x, f(2, 4, 8), weight) if fused else (x, [8], weight)
        bias = (f(8),) if "layer_norm" in str(norm) else ()
        _, *statistics = norm(*given, *bias, 1e-5)
        if fused:
            return backward, f(2, 4, 8), f(2, 4, 8), *statistics, weight, *tail
        return backward, f(2, 4, 8), x, [8], *statistics, weight, *bias, *tail

    return make


def grouped(name: str) -> Case:
    """Return a product grouped by expert; the operator comes with a module of Hugging Face."""

    def make() -> tuple:
        import transformers.integrations.moe  # noqa: F401  (defines the operator)

        x, w, ends = f(8, 4), f(2, 4, 8), torch.tensor([3, 8])
        op = getattr(torch.ops.transformers, name).default
        return (op, x, w, ends, *((f(8, 8),) if "backward" in name else ()))

    return make


BACKWARD: dict[str, Case] = {
    **on(
        "silu_backward.default tanh_backward.default sigmoid_backward.default gelu_backward.default"
        " hardsigmoid_backward.default hardswish_backward.default mish_backward.default",
        same,
        inside,
    ),
    **on("threshold_backward.default", same, same, 0.0),
    **on("hardshrink_backward.default softshrink_backward.default", same, same, 0.5),
    **on("logit_backward.default", same, inside),
    **on("elu_backward.default", same, 1.0, 1.0, 1.0, False, same),
    **on("leaky_relu_backward.default", same, same, 0.1, False),
    **on("hardtanh_backward.default", same, same, -1.0, 1.0),
    **on("softplus_backward.default", same, same, 1.0, 20.0),
    **on("log_sigmoid_backward.default", same, same, inside),
    **on("_softmax_backward_data.default _log_softmax_backward_data.default", same, inside, -1,
         torch.float64),
    "glu backward": lambda: (aten.glu_backward.default, f(4, 4), f(4, 8), 1),
    "embedding backward": lambda: (
        aten.embedding_dense_backward.default, f(4, 2, 8), ints(16, 4, 2), 16, -1, False
    ),
    "slice backward": lambda: (aten.slice_backward.default, f(4, 3), [4, 8], 1, 2, 5, 1),
    "select backward": lambda: (aten.select_backward.default, f(4, 2), [4, 8, 2], 1, 3),
    "diagonal backward": lambda: (aten.diagonal_backward.default, f(4, 7), [4, 8, 8], 1, 1, 2),
    "unfold backward": lambda: (aten.unfold_backward.default, f(4, 3, 3), [4, 8], 1, 3, 2),
    "cdist backward": lambda: (
        aten._cdist_backward.default, f(2, 4, 8), f(2, 4, 4), f(2, 8, 4), 2.0, f(2, 4, 8).abs()
    ),
    "masked scatter backward": lambda: (
        aten.masked_scatter_backward.default, f(4, 8), flags(4, 8), [4, 8]
    ),
    "flash attention": flash(False),
    "flash attention with a mask": flash(True),
    "flash attention backward": flash_backward(False),
    "flash attention backward with a mask": flash_backward(True),
    "layer norm backward": norm_backward(
        aten.native_layer_norm.default, aten.native_layer_norm_backward.default,
        ([True, True, True],), fused=False,
    ),
    "add layer norm backward": norm_backward(
        ours.add_layer_norm.default, ours.add_layer_norm_backward.default, (True,), fused=True
    ),
    "add rms norm backward": norm_backward(
        ours.add_rms_norm.default, ours.add_rms_norm_backward.default, (), fused=True
    ),
    "group norm backward": lambda: (
        aten.native_group_norm_backward.default, f(4, 8, 2), f(4, 8, 2), f(4, 2), f(4, 2).abs(),
        f(8), 4, 8, 2, 2, [True, True, True],
    ),
    "batch norm backward": lambda: (
        aten.native_batch_norm_backward.default, f(4, 8, 4), f(4, 8, 4), f(8), None, None, f(8),
        f(8).abs(), True, 1e-5, [True, True, True],
    ),
    "grouped product": grouped("grouped_mm_fallback"),
    "grouped product backward": grouped("grouped_mm_fallback_backward"),
}  # fmt: skip
FACTORIES: dict[str, Case] = {
    "full": lambda: (aten.full.default, [4, 8], 2.0),
    "zeros": lambda: (aten.zeros.default, [4, 8]),
    "ones": lambda: (aten.ones.default, [4, 8]),
    "empty": lambda: (aten.empty.memory_format, [4, 8]),
    "scalar": lambda: (aten.scalar_tensor.default, 2.0),
    "new ones": lambda: (aten.new_ones.default, f(2), [4, 8]),
    "new zeros": lambda: (aten.new_zeros.default, f(2), [4, 8]),
    "new full": lambda: (aten.new_full.default, f(2), [4, 8], 2.0),
    "new empty": lambda: (aten.new_empty.default, f(2), [4, 8]),
    "arange": lambda: (aten.arange.default, 8),
    "arange from": lambda: (aten.arange.start, 2, 8),
    "arange by steps": lambda: (aten.arange.start_step, 2, 8, 2),
    "eye": lambda: (aten.eye.default, 4),
    "eye of two sizes": lambda: (aten.eye.m, 4, 8),
    "linspace": lambda: (aten.linspace.default, 0, 1, 8),
    "lower triangle's indices": lambda: (aten.tril_indices.default, 4, 4),
    "upper triangle's indices": lambda: (aten.triu_indices.default, 4, 4),
}
UNDEFINED = overloads("empty.memory_format empty_like.default new_empty.default")
