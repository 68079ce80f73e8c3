"""Convolutions: samples and output channels may be split."""

from __future__ import annotations

import torch

from autoshard.ir.placement import Placement
from autoshard.ir.rules.call import Call, Choice, Rule
from autoshard.ir.rules.factors import Factors, Labels, solve
from autoshard.ir.rules.pointwise import overloads

aten = torch.ops.aten


def _convolution(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``nc..., oc..., o -> no...``; space and input channels are whole, groups too."""
    space: Labels = tuple(("s", d) for d in range(len(call.outs[0]) - 2))
    batch: Labels = ("n",) if len(call.shapes[0]) == len(call.shapes[1]) else ()
    labels = [(*batch, "c", *space), ("o", "c", *space)]
    if call.index("bias") is not None:
        labels.append(("o",))
    grouped = call.arguments.get("groups", 1) != 1
    whole = frozenset({"c", *space, *(("o",) if grouped else ())})
    factors = Factors(tuple(labels), ((*batch, "o", *space),), whole=whole, anchors=frozenset({1}))
    return solve(factors, call, ins)


def _pool(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Pooling and resizing work on each sample and channel alone."""
    rank = len(call.shapes[0])
    labels = tuple(range(rank))
    whole = frozenset(labels[2:])
    return solve(Factors((labels,), (labels,) * len(call.outs), whole=whole), call, ins)


TABLE: dict[object, Rule] = {
    **dict.fromkeys(
        overloads(
            "conv1d.default conv2d.default conv3d.default conv1d.padding conv2d.padding"
            " convolution.default"
        ),
        _convolution,
    ),
    **dict.fromkeys(
        overloads(
            "avg_pool1d.default avg_pool2d.default max_pool2d.default adaptive_avg_pool2d.default"
            " adaptive_avg_pool1d.default upsample_bilinear2d.vec upsample_bicubic2d.vec"
            " upsample_nearest2d.vec"
        ),
        _pool,
    ),
}
