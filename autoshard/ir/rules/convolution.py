"""Convolutions: samples and output channels may be split."""

from __future__ import annotations

import torch

from autoshard.ir.placement import Placement
from autoshard.ir.rules.call import Call, Choice, Rule
from autoshard.ir.rules.factors import Factors, Labels, solve
from autoshard.ir.rules.pointwise import overloads

aten = torch.ops.aten
TRANSPOSED = overloads("conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input")


def _convolution(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``nc..., oc..., o -> no...``; space and input channels are whole, groups too.

    The weight of a transposed one lies as ``co...``.
    """
    space: Labels = tuple(("s", d) for d in range(len(call.shapes[1]) - 2))
    batch: Labels = ("n",) if len(call.shapes[0]) == len(call.shapes[1]) else ()
    turned = call.op in TRANSPOSED or bool(call.arguments.get("transposed"))
    labels = [(*batch, "c", *space), (*(("c", "o") if turned else ("o", "c")), *space)]
    if call.index("bias") is not None:
        labels.append(("o",))
    grouped = call.arguments.get("groups", 1) != 1
    whole = frozenset({"c", *space, *(("o",) if grouped else ())})
    factors = Factors(tuple(labels), ((*batch, "o", *space),), whole=whole, anchors=frozenset({1}))
    return solve(factors, call, ins)


def _convolution_backward(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``no..., nc..., oc... -> nc..., oc..., o``: a weight's gradient sums over the samples."""
    space: Labels = tuple(("s", d) for d in range(len(call.shapes[1]) - 2))
    turned = bool(call["transposed"])
    weight = (*(("c", "o") if turned else ("o", "c")), *space)
    all_outs = (("n", "c", *space), weight, ("o",))
    outs = tuple(o for o, asked in zip(all_outs, call["output_mask"], strict=True) if asked)
    grouped = call["groups"] != 1
    whole = frozenset({"c", *space, *(("o",) if grouped else ())})
    factors = Factors(
        (("n", "o", *space), ("n", "c", *space), weight),
        outs,
        sums=frozenset({"n", "o"}) - whole,
        whole=whole,
        linear=(frozenset({0}),),
    )
    return solve(factors, call, ins)


def _pool(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Pooling and resizing work on each sample and channel alone; windows move over the rest."""
    labels = tuple(range(len(call.shapes[0])))
    outs = (labels,) * len(call.outs)
    return solve(Factors((labels,), outs, whole=_windows(call)), call, ins)


def _pool_backward(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """As pooling; linear in the gradient."""
    labels = tuple(range(len(call.outs[0])))
    linear = (frozenset({0}),)
    factors = Factors((labels,) * len(ins), (labels,), whole=_windows(call), linear=linear)
    return solve(factors, call, ins)


def _windows(call: Call) -> frozenset[int]:
    """Return the last dims: as many as the operator's name says."""
    rank = len(call.outs[0])
    count = next(n for n in (1, 2, 3) if f"{n}d" in str(call.op))
    return frozenset(range(rank - count, rank))


TABLE: dict[object, Rule] = {
    **dict.fromkeys(
        overloads(
            "conv1d.default conv2d.default conv3d.default conv1d.padding conv2d.padding"
            " convolution.default conv_transpose1d.default conv_transpose2d.input"
            " conv_transpose3d.input"
        ),
        _convolution,
    ),
    aten.convolution_backward.default: _convolution_backward,
    **dict.fromkeys(
        overloads(
            "avg_pool1d.default avg_pool2d.default max_pool2d.default adaptive_avg_pool2d.default"
            " adaptive_avg_pool1d.default upsample_bilinear2d.vec upsample_bicubic2d.vec"
            " upsample_nearest2d.vec upsample_linear1d.vec upsample_nearest1d.vec"
            " upsample_linear1d.default upsample_nearest1d.default upsample_nearest2d.default"
            " upsample_bilinear2d.default upsample_bicubic2d.default max_pool1d.default"
            " max_pool2d_with_indices.default _adaptive_avg_pool2d.default"
        ),
        _pool,
    ),
    **dict.fromkeys(
        overloads(
            "avg_pool2d_backward.default max_pool2d_with_indices_backward.default"
            " upsample_linear1d_backward.default upsample_nearest1d_backward.default"
            " upsample_nearest2d_backward.default upsample_bilinear2d_backward.default"
            " upsample_bicubic2d_backward.default _adaptive_avg_pool2d_backward.default"
            " reflection_pad1d_backward.default reflection_pad2d_backward.default"
        ),
        _pool_backward,
    ),
}
