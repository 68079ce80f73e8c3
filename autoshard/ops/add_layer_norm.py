"""Residual add and LayerNorm as one op, with its backward as a second one.

    y, s, mean, rstd = add_layer_norm(x, residual, weight, bias, eps)
    s = x + residual                            # rounded to x's dtype, as eager rounds it
    y = (s - mean) * rstd * weight + bias       # over the last dimension, accumulated in float32

A pre-LN Transformer needs both results: ``y`` feeds the block, ``s`` the next residual.  The
backward takes the gradients of both and makes one pass over memory.  ``dx`` is also the gradient of
``residual``.  This file holds schema, reference and autograd; the kernels are in ``csrc/``.
"""

from typing import Any

import torch
from torch import Tensor

from autoshard.ops import native
from autoshard.ops import norm_checks as checks
from autoshard.ops.library import call_directly

NAME = "autoshard::add_layer_norm"
BACKWARD = "autoshard::add_layer_norm_backward"

library = torch.library.Library("autoshard", "FRAGMENT")
library.define(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor y, Tensor s, Tensor mean, Tensor rstd)"
)
library.define(
    "add_layer_norm_backward(Tensor dy, Tensor? ds, Tensor s, Tensor mean, Tensor rstd,"
    " Tensor? weight, bool has_bias) -> (Tensor dx, Tensor dweight, Tensor dbias)"
)


def reference_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (y, s, mean, rstd) computed by torch ops; s and y have x's dtype."""
    s = (x + residual).contiguous()  # sums are taken in one order, however the inputs lie
    wide = s.to(checks.statistics_dtype(x.dtype))
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    centred = centred - centred.mean(-1, keepdim=True)  # what the rounding of a large mean left
    rstd = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    y = centred * rstd
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype), s, mean, rstd


def reference_backward(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx, dweight, dbias) computed by torch ops; an absent parameter's is empty.

    With h = (s - mean) * rstd and g = dy * weight:
    dx = ds + rstd * (g - mean(g) - h * mean(g * h)), dweight = sum(dy * h), dbias = sum(dy).
    """
    normed = (s.to(mean.dtype) - mean) * rstd
    wide = dy.contiguous().to(mean.dtype)
    scaled = wide if weight is None else wide * weight
    dx = scaled - scaled.mean(-1, keepdim=True)
    dx = (dx - normed * (scaled * normed).mean(-1, keepdim=True)) * rstd
    if ds is not None:
        dx = dx + ds
    dtype = s.dtype if weight is None else weight.dtype
    hidden = s.shape[-1]
    dweight = dbias = s.new_empty([0], dtype=dtype)
    if weight is not None:
        dweight = (wide * normed).reshape(-1, hidden).sum(0).to(dtype)
    if has_bias:
        dbias = wide.reshape(-1, hidden).sum(0).to(dtype)
    return dx.to(s.dtype), dweight, dbias


def forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (y, s, mean, rstd) by the compiled kernel if there is one, else by the reference.

    Generated code calls it directly, without the dispatcher and without the op's checks.
    """
    if native.has_kernel(x):
        return native.add_layer_norm(x, residual, weight, bias, eps)
    y, s, mean, rstd = reference_forward(x, residual, weight, bias, eps)
    return y.contiguous(), s.contiguous(), mean, rstd


def backward(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx, dweight, dbias) by the compiled kernel if there is one, else by the reference."""
    if native.has_kernel(s):
        return native.add_norm_backward(dy, ds, s, mean, rstd, weight, has_bias)
    dx, dweight, dbias = reference_backward(dy, ds, s, mean, rstd, weight, has_bias)
    return dx.contiguous(), dweight, dbias


def _fake_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_forward(x, residual, weight, bias, eps)
    shape, dtype = checks.statistics_shape(x), checks.statistics_dtype(x.dtype)
    return (
        x.new_empty(x.shape),
        x.new_empty(x.shape),
        x.new_empty(shape, dtype=dtype),
        x.new_empty(shape, dtype=dtype),
    )


def _fake_backward(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_backward(dy, ds, s, mean, rstd, weight, has_bias)
    dtype = s.dtype if weight is None else weight.dtype
    dweight = s.new_empty([0 if weight is None else s.shape[-1]], dtype=dtype)
    dbias = s.new_empty([s.shape[-1] if has_bias else 0], dtype=dtype)
    return s.new_empty(s.shape), dweight, dbias


def _check_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, _eps: float
) -> None:
    checks.check_sum(NAME, x, residual)
    checks.check_parameter(NAME, "weight", x, weight)
    checks.check_parameter(NAME, "bias", x, bias)
    checks.check_same_dtype(NAME, "weight", weight, "bias", bias)


def _check_backward(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    _has_bias: bool,
) -> None:
    checks.check_gradient(BACKWARD, "dy", s, dy)
    checks.check_gradient(BACKWARD, "ds", s, ds)
    checks.check_statistics(BACKWARD, "mean", s, mean)
    checks.check_statistics(BACKWARD, "rstd", s, rstd)
    checks.check_parameter(BACKWARD, "weight", s, weight)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, bias, _ = inputs
    _, s, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(s, mean, rstd, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _differentiate(
    ctx: Any, dy: Tensor | None, ds: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    s, mean, rstd, weight = ctx.saved_tensors
    has_bias = ctx.bias_dtype is not None
    if dy is None:
        # Only the sum was used: the normalisation has no gradient.
        return ds, ds, None, None, None
    dx, dweight, dbias = torch.ops.autoshard.add_layer_norm_backward(
        dy, ds, s, mean, rstd, weight, has_bias
    )
    return (
        dx,
        dx,
        None if weight is None else dweight,
        dbias.to(ctx.bias_dtype) if has_bias else None,
        None,
    )


for _key in ("CPU", "CUDA"):
    library.impl("add_layer_norm", checks.behind(_check_forward, forward), _key)
    library.impl("add_layer_norm_backward", checks.behind(_check_backward, backward), _key)
torch.library.register_fake(NAME, _fake_forward, lib=library)
torch.library.register_fake(BACKWARD, _fake_backward, lib=library)
torch.library.register_autograd(NAME, _differentiate, setup_context=_setup_context, lib=library)
call_directly(torch.ops.autoshard.add_layer_norm.default, forward, reference_forward)
call_directly(torch.ops.autoshard.add_layer_norm_backward.default, backward, reference_backward)
