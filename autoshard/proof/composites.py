"""Readings of norms, embeddings and dropout: the named rewrites of the compiler.

Each says which plain operators a fused operator, or one over a split vocabulary, stands for. That
they compute the same numbers is tested operator by operator; here it is assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch.fx import Node

from autoshard.ir.node_info import val
from autoshard.ir.rules.call import bound_arguments
from autoshard.ops import add_layer_norm as _add_layer_norm  # noqa: F401  (registers the op)
from autoshard.ops import vocab
from autoshard.ops.bias_dropout_add_layer_norm import backward as dropout_add_norm_backward
from autoshard.ops.bias_dropout_add_layer_norm import bias_dropout_add_layer_norm
from autoshard.ops.dropout import DropoutArgs, dropout
from autoshard.proof.reader import Reader, Reading, Value, reduction

aten = torch.ops.aten


def _layer_norm(reader: Reader, node: Node) -> Value:
    given = bound_arguments(node)
    x, weight, bias = (given.get(name) for name in ("input", "weight", "bias"))
    extent = prod(given["normalized_shape"])
    return _normed(reader, reader.env[x], weight, bias, given["eps"], extent)


def _normed(
    reader: Reader, x: int, weight: Node | None, bias: Node | None, eps: float, extent: int
) -> tuple[int, ...]:
    """Return a norm's results; a row is ``extent`` elements, which no rank has a part of."""
    held = [reader.env[n] for n in (weight, bias) if n is not None]
    given = (weight is not None, bias is not None)
    norm = reader.terms.make("layer_norm", (x, *held), given, eps, extent)
    return tuple(reader.terms.make("item", (norm,), i) for i in range(3))


def _layer_norm_backward(reader: Reader, node: Node) -> Value:
    given = bound_arguments(node)
    names = ("grad_out", "input", "mean", "rstd", "weight")
    held = [reader.env[given[name]] for name in names if given[name] is not None]
    return _norm_gradients(reader, held, prod(given["normalized_shape"]))


def _norm_gradients(reader: Reader, held: Iterable[int], extent: int) -> tuple[int, ...]:
    norm = reader.terms.make("layer_norm_backward", held, extent)
    return tuple(reader.terms.make("item", (norm,), i) for i in range(3))


def _read_add_layer_norm(reader: Reader, node: Node) -> Value:
    """``add_layer_norm(x, r)`` is ``s = x + r`` and ``layer_norm(s)``."""
    reader.used.add("fused add and LayerNorm")
    x, residual, weight, bias, eps = node.args
    total = reader.terms.add(reader.env[x], reader.env[residual])
    y, mean, rstd = _normed(reader, total, weight, bias, eps, val(x).shape[-1])
    return y, total, mean, rstd


def _add_layer_norm_backward(reader: Reader, node: Node) -> Value:
    dy, ds, s, mean, rstd, weight = node.args[:6]
    held = [reader.env[n] for n in (dy, s, mean, rstd, weight) if n is not None]
    dx, *rest = _norm_gradients(reader, held, val(s).shape[-1])
    if ds is not None:
        dx = reader.terms.add(dx, reader.env[ds])
    return dx, *rest


def _dropout_add_layer_norm(reader: Reader, node: Node) -> Value:
    """``s = dropout(x + input_bias) + residual`` and ``layer_norm(s)``."""
    reader.used.add("fused bias, dropout, add and LayerNorm")
    x, input_bias, residual, weight, bias, eps, *place = node.args
    inner = reader.env[x]
    if input_bias is not None:
        inner = reader.terms.add(inner, reader.broadcast(input_bias, reader.shape(x)))
    dropped = _masked(reader, inner, x, place)
    total = reader.terms.add(dropped, reader.env[residual])
    y, mean, rstd = _normed(reader, total, weight, bias, eps, val(x).shape[-1])
    return y, total, mean, rstd


def _dropout_add_layer_norm_backward(reader: Reader, node: Node) -> Value:
    dy, ds, s, mean, rstd, weight, _, has_input_bias, *place = node.args
    held = [reader.env[n] for n in (dy, s, mean, rstd, weight) if n is not None]
    total, dweight, dbias = _norm_gradients(reader, held, val(s).shape[-1])
    if ds is not None:
        total = reader.terms.add(total, reader.env[ds])
    dx = _masked(reader, total, s, place)
    rows = range(val(s).dim() - 1)
    summed = reduction(reader.terms, "sum", dx, reader.shape(s), rows) if has_input_bias else dx
    return dx, total, summed, dweight, dbias


def _masked(reader: Reader, x: int, like: Node, place: Sequence[object]) -> int:
    args = DropoutArgs(like, *place)
    attrs = args.p, args.site, args.batch_dim, args.rows
    return reader.terms.make("dropout", (x, reader.env[args.rng]), *attrs, reader.shape(like))


def _embedding(reader: Reader, node: Node) -> Value:
    weight, indices = node.args[:2]
    if node.target is vocab.vocab_embedding:
        reader.used.add("embedding over a split vocabulary")
    return reader.terms.make("embedding", (reader.env[weight], reader.env[indices]))


def _embedding_backward(reader: Reader, node: Node) -> Value:
    given = bound_arguments(node)
    grad = given.get("grad_output", given.get("grad"))
    by_frequency = given.get("scale_grad_by_freq", False)
    children = reader.env[grad], reader.env[given["indices"]]
    return reader.terms.make("embedding_backward", children, given["padding_idx"], by_frequency)


def _dropout(reader: Reader, node: Node) -> Value:
    """The mask follows the global element, so only how the rank's part lies is erased."""
    x, *place = node.args
    reader.used.add("dropout by counter")
    return _masked(reader, reader.env[x], x, place)


TABLE: dict[object, Reading] = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    torch.ops.autoshard.add_layer_norm.default: _read_add_layer_norm,
    torch.ops.autoshard.add_layer_norm_backward.default: _add_layer_norm_backward,
    bias_dropout_add_layer_norm: _dropout_add_layer_norm,
    dropout_add_norm_backward: _dropout_add_layer_norm_backward,
    aten.embedding.default: _embedding,
    vocab.vocab_embedding: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    vocab.vocab_embedding_backward: _embedding_backward,
    dropout: _dropout,
}
