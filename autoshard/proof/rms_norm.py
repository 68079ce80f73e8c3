"""Readings of the fused add and RMSNorm: spelled out as torch spells its own RMSNorm.

Where a stage begins with such a norm the compiler takes it apart, so both spellings must be one
term, forward and backward. With s = x + r, h = s * rstd and g = dy * weight:

    rstd = rsqrt(mean(s ** 2) + eps)                         y = h * weight
    ds' = ds + g * rstd - rstd ** 3 / 2 * sum(g * s) / D * 2 s     dweight = sum(dy * h)
"""

from __future__ import annotations

import torch
from torch.fx import Node

from autoshard.ops import add_rms_norm as _add_rms_norm  # noqa: F401  (registers the op)
from autoshard.proof.reader import Reader, Reading, Value, reduction
from autoshard.proof.readings import add_number, expanded, mean, product, times

aten = torch.ops.aten
RMS_NORM = "fused add and RMSNorm"


def _forward(reader: Reader, node: Node) -> Value:
    """``y, s, rstd = add_rms_norm(x, r, weight, eps)``."""
    reader.used.add(RMS_NORM)
    x, residual, weight, eps = node.args
    total = reader.terms.add(reader.env[x], reader.env[residual])
    shape = reader.shape(x)
    square = reader.call(aten.pow.Tensor_Scalar, total, 2)
    total_square = reduction(reader.terms, "sum", square, shape, _last(x))
    mean_square = mean(reader, total_square, shape, _last(x))
    rstd = reader.call(aten.rsqrt.default, add_number(reader, mean_square, eps))
    normed = product(reader, total, rstd)
    y = normed if weight is None else product(reader, normed, reader.broadcast(weight, shape))
    return y, total, rstd


def _backward(reader: Reader, node: Node) -> Value:
    """``dx, dweight = add_rms_norm_backward(dy, ds, s, rstd, weight)``."""
    dy, ds, s, rstd, weight = (None if n is None else reader.env[n] for n in node.args)
    shape = reader.shape(node.args[2])
    if weight is not None:
        weight = reader.broadcast(node.args[4], shape)
    scaled = dy if weight is None else product(reader, dy, weight)
    through_norm = product(reader, scaled, rstd)
    through_rstd = _through_rstd(reader, product(reader, scaled, s), s, rstd, node.args[2])
    dx = reader.terms.add(*(() if ds is None else (ds,)), through_norm, through_rstd)
    if weight is None:
        return dx, reader.terms.make("unused", (dx,))
    by_weight = product(reader, dy, product(reader, s, rstd))
    rows = None if shape is None else range(len(shape) - 1)
    return dx, reduction(reader.terms, "sum", by_weight, shape, rows or ())


def _through_rstd(reader: Reader, product_with_s: int, s: int, rstd: int, like: Node) -> int:
    """Return the gradient that reaches s by way of its mean square."""
    shape = reader.shape(like)
    total = reduction(reader.terms, "sum", product_with_s, shape, _last(like))
    halved = times(reader, total, -0.5)
    of_mean = product(reader, halved, reader.call(aten.pow.Tensor_Scalar, rstd, 3))
    row = None if shape is None else (*shape[:-1], 1)
    wide = expanded(reader, of_mean, row, shape)
    of_square = times(reader, wide, 1.0 / like.meta["val"].shape[-1])
    slope = times(reader, reader.call(aten.pow.Tensor_Scalar, s, 1.0), 2.0)
    return product(reader, of_square, slope)


def _last(node: Node) -> tuple[int, ...]:
    return (node.meta["val"].dim() - 1,)


TABLE: dict[object, Reading] = {
    torch.ops.autoshard.add_rms_norm.default: _forward,
    torch.ops.autoshard.add_rms_norm_backward.default: _backward,
}
