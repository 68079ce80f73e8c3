"""Operators that only lowered graphs have: fused attention and the backward forms.

All are linear in the incoming gradient, so a partial gradient passes through them; a gradient of a
parameter sums over all dims that the parameter lacks, so it is partial where one of them is split.
"""

from __future__ import annotations

import torch

from autoshard.ir.placement import Placement
from autoshard.ir.rules.call import Call, Choice, Rule
from autoshard.ir.rules.factors import NONE, Factors, Labels, broadcast, solve
from autoshard.ir.rules.pointwise import overloads
from autoshard.ops import add_layer_norm as _add_layer_norm  # noqa: F401  (registers the op)
from autoshard.ops import add_rms_norm as _add_rms_norm  # noqa: F401
from autoshard.ops import bias_dropout_add_layer_norm as _dropout_norm  # noqa: F401
from autoshard.ops import collectives

aten = torch.ops.aten
ours = torch.ops.autoshard
GRADIENT = (frozenset({0}),)


def _attention(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``bhqd, bhkd, bhkd, mask -> bhqd, bhq``."""
    query, key = ("b", "h", "q", "d"), ("b", "h", "k", "d")
    labels = [query, key, key]
    if call.index("attn_mask") is not None:
        labels.append(_mask(call))
    whole = frozenset({"q", "k", "d"})
    return solve(Factors(tuple(labels), (query, ("b", "h", "q")), whole=whole), call, ins)


def _attention_backward(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``dout, q, k, v, out, lse, mask -> dq, dk, dv``."""
    query, key = ("b", "h", "q", "d"), ("b", "h", "k", "d")
    labels = [query, query, key, key, query, ("b", "h", "q")]
    if call.index("attn_mask") is not None:
        labels.append(_mask(call))
    whole = frozenset({"q", "k", "d"})
    return solve(Factors(tuple(labels), (query, key, key), whole=whole), call, ins)


def _mask(call: Call) -> Labels:
    shape = call.shapes[call.index("attn_mask")]
    full = ("b", "h", "q", "k")[4 - len(shape) :]
    lead = call.shapes[0][4 - len(shape) :]
    return tuple(
        None if extent == 1 and lead[d] != 1 and label in "bh" else label
        for d, (extent, label) in enumerate(zip(shape, full, strict=True))
    )


def _norm_backward(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``dy, ... -> dx, dweight, dbias``: parameters' gradients sum over the rows."""
    rank = len(call.shapes[0])
    labels = tuple(range(rank))
    last = labels[-1:]
    inputs = [_like(labels, s, call.shapes[0]) for s in call.shapes]
    if call.index("rng") is not None:
        inputs[call.index("rng")] = ("rng",)
    outs = tuple(labels if len(s) == rank and rank > 1 else last for s in call.outs)
    rows = frozenset(labels[:-1])
    whole = frozenset({*last, "rng"})
    return solve(Factors(tuple(inputs), outs, sums=rows, whole=whole), call, ins)


def _like(labels: Labels, shape: tuple[int, ...], full: tuple[int, ...]) -> Labels:
    """Return the labels of an input beside one of shape ``full``: size 1 for a reduced dim."""
    own = labels[len(labels) - len(shape) :]
    extents = full[len(full) - len(shape) :]
    return tuple(
        None if extent == 1 and extents[d] != 1 else own[d] for d, extent in enumerate(shape)
    )


def _pointwise(call: Call, ins: tuple[Placement, ...]) -> Choice:
    labels = broadcast(call.shapes, call.outs[0])
    out = tuple(range(len(call.outs[0])))
    return solve(Factors(labels, (out,), linear=GRADIENT), call, ins)


def _softmax_backward(call: Call, ins: tuple[Placement, ...]) -> Choice:
    labels = tuple(range(len(call.shapes[0])))
    whole = frozenset({call.dim("dim")})
    return solve(Factors((labels, labels), (labels,), whole=whole, linear=GRADIENT), call, ins)


def _embedding_backward(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``rows.. d, rows.. -> v d``: the rows are summed."""
    rows = tuple(range(len(call.shapes[1])))
    factors = Factors(
        ((*rows, "d"), rows),
        (("v", "d"),),
        sums=frozenset(rows),
        whole=frozenset("v"),
        linear=GRADIENT,
    )
    return solve(factors, call, ins)


def _glu_backward(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``dy, x -> dx``; the dim that is gated is whole."""
    labels = tuple(range(len(call.outs[0])))
    whole = frozenset({call["dim"] % max(len(labels), 1)})
    return solve(Factors((labels, labels), (labels,), whole=whole, linear=GRADIENT), call, ins)


def _placed_in_zeros(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``slice_backward`` and ``select_backward``: the dim that is cut must be whole."""
    rank = len(call.outs[0])
    dim = call["dim"] % rank
    out = tuple(range(rank))
    is_select = len(call.shapes[0]) < rank
    given = out[:dim] + out[dim + 1 :] if is_select else out
    whole = NONE if is_select else frozenset({dim})
    outs = (*out[:dim], None, *out[dim + 1 :]) if is_select else out
    return solve(Factors((given,), (outs,), whole=whole, linear=GRADIENT), call, ins)


def _release(call: Call, ins: tuple[Placement, ...]) -> Choice:
    return Choice(ins, ())


TABLE: dict[object, Rule] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    ours.add_layer_norm_backward.default: _norm_backward,
    ours.add_rms_norm_backward.default: _norm_backward,
    ours.bias_dropout_add_layer_norm_backward.default: _norm_backward,
    aten.native_layer_norm_backward.default: _norm_backward,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _softmax_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.glu_backward.default: _glu_backward,
    aten.slice_backward.default: _placed_in_zeros,
    aten.select_backward.default: _placed_in_zeros,
    collectives.release: _release,
    **dict.fromkeys(
        overloads(
            "gelu_backward.default silu_backward.default tanh_backward.default"
            " sigmoid_backward.default threshold_backward.default elu_backward.default"
            " leaky_relu_backward.default hardshrink_backward.default hardsigmoid_backward.default"
            " hardswish_backward.default hardtanh_backward.default log_sigmoid_backward.default"
            " logit_backward.default mish_backward.default softplus_backward.default"
            " softshrink_backward.default"
        ),
        _pointwise,
    ),
}
