"""Bias, dropout, residual add and LayerNorm in one pass over memory, and the backward in another.

    t = dropout(x + input_bias, rng, p, site)     # float32; never stored, nor is its mask
    s = t + residual                              # rounded once to x's dtype
    y = LayerNorm(s) * weight + bias

``input_bias`` is the bias of the linear layer before, which gives it up.  The mask is that of the
dropout operator at the same place: ``rng``, ``p``, ``site`` and what follows are its arguments.  In
16-bit dtypes the sum is rounded once, where eager rounds after each of the three steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoshard.ops import add_layer_norm, native
from autoshard.ops import norm_checks as checks
from autoshard.ops.communicator import Communicator
from autoshard.ops.dropout import DropoutArgs, keep
from autoshard.ops.dropout_runs import row_keys
from autoshard.ops.library import define

NAME = "autoshard::bias_dropout_add_layer_norm"
# How a dropout is drawn: the arguments of DropoutArgs after x.
_PLACE = (
    "Tensor rng, float p, int site, int batch_dim, int rows, int[] dims, int[] counts,"
    " int[] blocks, str[] axes, int[] sizes"
)
_PLACE_COUNT = len(DropoutArgs._fields) - 1


def sharded(args: tuple, dim: int, blocks: tuple[int, ...], axis: str, size: int) -> tuple:
    """Return the operator's arguments for values that are also split along ``dim`` over ``axis``.

    See ``DropoutArgs.sharded``.
    """
    head, place = args[:-_PLACE_COUNT], args[-_PLACE_COUNT:]
    return (*head, *DropoutArgs(args[0], *place).sharded(dim, blocks, axis, size)[1:])


def reference_forward(
    comm: Communicator,
    x: Tensor,
    input_bias: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *place: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (y, s, mean, rstd) computed by torch ops."""
    wide = x.to(checks.statistics_dtype(x.dtype))
    if input_bias is not None:
        wide = wide + input_bias
    s = (wide * _factor(comm, x, wide.dtype, place) + residual).to(x.dtype)
    y, _, mean, rstd = add_layer_norm.reference_forward(s, torch.zeros_like(s), weight, bias, eps)
    return y, s, mean, rstd


def reference_backward(
    comm: Communicator,
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    has_bias: bool,
    has_input_bias: bool,
    *place: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (dx, dresidual, dinput_bias, dweight, dbias) computed by torch ops."""
    wide, dweight, dbias = add_layer_norm.reference_backward(
        dy, ds, s.to(mean.dtype), mean, rstd, weight, has_bias
    )
    dx = wide * _factor(comm, s, wide.dtype, place)
    dtype = s.dtype if weight is None else weight.dtype
    dinput_bias = s.new_empty([0], dtype=dtype)
    if has_input_bias:
        dinput_bias = dx.reshape(-1, s.shape[-1]).sum(0).to(dtype)
    dbias = dbias.to(dtype)
    return dx.to(s.dtype), wide.to(s.dtype), dinput_bias, dweight.to(dtype), dbias


def _factor(comm: Communicator, x: Tensor, dtype: torch.dtype, place: tuple) -> Tensor:
    return keep(DropoutArgs(x, *place), comm).to(dtype) / (1.0 - place[1])


def _forward(
    comm: Communicator,
    x: Tensor,
    input_bias: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *place: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(x, input_bias, residual, weight, bias)
    args = DropoutArgs(x, *place)
    is_differentiated = torch.is_grad_enabled() and any(
        value is not None and value.requires_grad
        for value in (x, input_bias, residual, weight, bias)
    )
    keys = None if is_differentiated else row_keys(args, comm, x.shape[-1])
    if keys is not None:
        return native.dropout_add_layer_norm(x, input_bias, residual, weight, bias, eps, keys)
    return reference_forward(comm, x, input_bias, residual, weight, bias, eps, *place)


def _backward(
    comm: Communicator,
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    has_bias: bool,
    has_input_bias: bool,
    *place: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    keys = row_keys(DropoutArgs(s, *place), comm, s.shape[-1])
    if keys is not None:
        return native.dropout_add_norm_backward(
            dy, ds, s, mean, rstd, weight, has_bias, has_input_bias, keys
        )
    return reference_backward(comm, dy, ds, s, mean, rstd, weight, has_bias, has_input_bias, *place)


def _fake_forward(
    x: Tensor,
    input_bias: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *place: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(x, input_bias, residual, weight, bias)
    shape, dtype = checks.statistics_shape(x), checks.statistics_dtype(x.dtype)
    statistics = [x.new_empty(shape, dtype=dtype) for _ in range(2)]
    return x.new_empty(x.shape), x.new_empty(x.shape), statistics[0], statistics[1]


def _fake_backward(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    has_bias: bool,
    has_input_bias: bool,
    *place: Any,
) -> tuple[Tensor, ...]:
    dtype = s.dtype if weight is None else weight.dtype
    wanted = (has_input_bias, weight is not None, has_bias)
    vectors = [s.new_empty([s.shape[-1] if want else 0], dtype=dtype) for want in wanted]
    return s.new_empty(s.shape), s.new_empty(s.shape), *vectors


def _check(
    x: Tensor,
    input_bias: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> None:
    checks.check_sum(NAME, x, residual)
    checks.check_parameter(NAME, "input_bias", x, input_bias)
    checks.check_parameter(NAME, "weight", x, weight)
    checks.check_parameter(NAME, "bias", x, bias)
    checks.check_same_dtype(NAME, "input_bias", input_bias, "weight", weight)
    checks.check_same_dtype(NAME, "weight", weight, "bias", bias)
    checks.check_same_dtype(NAME, "input_bias", input_bias, "bias", bias)


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    _, input_bias, _, weight, bias, _, rng, *rest = inputs
    _, s, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(s, mean, rstd, weight, rng)
    ctx.has = (bias is not None, input_bias is not None)
    ctx.rest = rest


def _differentiate(
    ctx: Any, dy: Tensor | None, ds: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    s, mean, rstd, weight, rng = ctx.saved_tensors
    has_bias, has_input_bias = ctx.has
    if dy is None:
        # The op differentiates the norm as well: without its gradient it is a gradient of zero.
        dy = torch.zeros_like(s)
    dx, dresidual, dinput_bias, dweight, dbias = backward(
        dy, ds, s, mean, rstd, weight, has_bias, has_input_bias, rng, *ctx.rest
    )
    return (
        dx,
        dinput_bias if has_input_bias else None,
        dresidual,
        None if weight is None else dweight,
        dbias if has_bias else None,
        *[None] * (1 + _PLACE_COUNT),
    )


backward = define(
    "bias_dropout_add_layer_norm_backward(Tensor dy, Tensor? ds, Tensor s, Tensor mean,"
    f" Tensor rstd, Tensor? weight, bool has_bias, bool has_input_bias, {_PLACE})"
    " -> (Tensor dx, Tensor dresidual, Tensor dinput_bias, Tensor dweight, Tensor dbias)",
    fake=_fake_backward,
    run=_backward,
    reference=reference_backward,
)
bias_dropout_add_layer_norm = define(
    "bias_dropout_add_layer_norm(Tensor x, Tensor? input_bias, Tensor residual, Tensor? weight,"
    f" Tensor? bias, float eps, {_PLACE}) -> (Tensor y, Tensor s, Tensor mean, Tensor rstd)",
    fake=_fake_forward,
    run=_forward,
    reference=reference_forward,
    backward=_differentiate,
    setup=_setup,
)
