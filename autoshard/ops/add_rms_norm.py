"""Residual add and RMSNorm as one op, with its backward as a second one.

    y, s, rstd = add_rms_norm(x, residual, weight, eps)
    s = x + residual                                     # rounded to x's dtype, as eager rounds it
    y = s * rstd * weight,  rstd = 1 / sqrt(mean(s**2) + eps)   # accumulated in float32

The twin of ``add_layer_norm`` without mean and bias.  ``y`` is rounded once, as
``torch.nn.functional.rms_norm`` does; Llama's own code rounds once more before the weight.
"""

from typing import Any

import torch
from torch import Tensor

from autoshard.ops import native
from autoshard.ops import norm_checks as checks
from autoshard.ops.library import call_directly

NAME = "autoshard::add_rms_norm"
BACKWARD = "autoshard::add_rms_norm_backward"

library = torch.library.Library("autoshard", "FRAGMENT")
library.define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps)"
    " -> (Tensor y, Tensor s, Tensor rstd)"
)
library.define(
    "add_rms_norm_backward(Tensor dy, Tensor? ds, Tensor s, Tensor rstd, Tensor? weight)"
    " -> (Tensor dx, Tensor dweight)"
)


def reference_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, s, rstd) computed by torch ops; s and y have x's dtype."""
    s = (x + residual).contiguous()  # sums are taken in one order, however the inputs lie
    wide = s.to(checks.statistics_dtype(x.dtype))
    rstd = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    y = wide * rstd
    if weight is not None:
        y = y * weight
    return y.to(x.dtype), s, rstd


def reference_backward(
    dy: Tensor, ds: Tensor | None, s: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (dx, dweight) computed by torch ops; dweight is empty without a weight.

    With h = s * rstd and g = dy * weight: dx = ds + rstd * (g - h * mean(g * h)),
    dweight = sum(dy * h).
    """
    normed = s.to(rstd.dtype) * rstd
    wide = dy.contiguous().to(rstd.dtype)
    scaled = wide if weight is None else wide * weight
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rstd
    if ds is not None:
        dx = dx + ds
    if weight is None:
        return dx.to(s.dtype), s.new_empty([0])
    dweight = (wide * normed).reshape(-1, s.shape[-1]).sum(0)
    return dx.to(s.dtype), dweight.to(weight.dtype)


def forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, s, rstd) by the compiled kernel if there is one, else by the reference.

    Generated code calls it directly, without the dispatcher and without the op's checks.
    """
    if native.has_kernel(x):
        return native.add_rms_norm(x, residual, weight, eps)
    y, s, rstd = reference_forward(x, residual, weight, eps)
    return y.contiguous(), s.contiguous(), rstd


def backward(
    dy: Tensor, ds: Tensor | None, s: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (dx, dweight) by the compiled kernel if there is one, else by the reference."""
    if native.has_kernel(s):
        dx, dweight, _ = native.add_norm_backward(dy, ds, s, None, rstd, weight, False)
        return dx, dweight
    dx, dweight = reference_backward(dy, ds, s, rstd, weight)
    return dx.contiguous(), dweight


def _fake_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check_forward(x, residual, weight, eps)
    rstd = x.new_empty(checks.statistics_shape(x), dtype=checks.statistics_dtype(x.dtype))
    return x.new_empty(x.shape), x.new_empty(x.shape), rstd


def _fake_backward(
    dy: Tensor, ds: Tensor | None, s: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    _check_backward(dy, ds, s, rstd, weight)
    dweight = s.new_empty([0]) if weight is None else weight.new_empty([s.shape[-1]])
    return s.new_empty(s.shape), dweight


def _check_forward(x: Tensor, residual: Tensor, weight: Tensor | None, _eps: float) -> None:
    checks.check_sum(NAME, x, residual)
    checks.check_parameter(NAME, "weight", x, weight)


def _check_backward(
    dy: Tensor, ds: Tensor | None, s: Tensor, rstd: Tensor, weight: Tensor | None
) -> None:
    checks.check_gradient(BACKWARD, "dy", s, dy)
    checks.check_gradient(BACKWARD, "ds", s, ds)
    checks.check_statistics(BACKWARD, "rstd", s, rstd)
    checks.check_parameter(BACKWARD, "weight", s, weight)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, s, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(s, rstd, inputs[2])


def _differentiate(
    ctx: Any, dy: Tensor | None, ds: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    s, rstd, weight = ctx.saved_tensors
    if dy is None:
        # Only the sum was used: the normalisation has no gradient.
        return ds, ds, None, None
    dx, dweight = torch.ops.autoshard.add_rms_norm_backward(dy, ds, s, rstd, weight)
    return dx, dx, None if weight is None else dweight, None


for _key in ("CPU", "CUDA"):
    library.impl("add_rms_norm", checks.behind(_check_forward, forward), _key)
    library.impl("add_rms_norm_backward", checks.behind(_check_backward, backward), _key)
torch.library.register_fake(NAME, _fake_forward, lib=library)
torch.library.register_fake(BACKWARD, _fake_backward, lib=library)
torch.library.register_autograd(NAME, _differentiate, setup_context=_setup_context, lib=library)
call_directly(torch.ops.autoshard.add_rms_norm.default, forward, reference_forward)
call_directly(torch.ops.autoshard.add_rms_norm_backward.default, backward, reference_backward)
