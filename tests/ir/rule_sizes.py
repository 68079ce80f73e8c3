"""How arguments that are sizes are written on one rank: ``LOCAL`` has them by operator."""

from __future__ import annotations

import torch

from autoshard.ir.placement import Shard
from autoshard.ir.rules.call import Choice
from autoshard.ir.rules.pointwise import overloads
from tests.ir.rule_harness import Local

aten = torch.ops.aten


def shape_of_output(name: str, place: int = 0) -> Local:
    """Return how an argument that is the output's shape is written on one rank."""

    def local(bound: dict, choice: Choice, size: int) -> dict:
        shape, out = list(bound[name]), choice.outs[place]
        if isinstance(out, Shard):
            shape[out.dim] //= size
        return {**bound, name: shape}

    return local


def pieces(name: str) -> Local:
    """Return how the lengths of pieces of a split dim are written on one rank."""

    def local(bound: dict, choice: Choice, size: int) -> dict:
        held, given = choice.wants[0], bound[name]
        if not isinstance(held, Shard) or held.dim != bound["dim"]:
            return bound
        return {**bound, name: given // size if isinstance(given, int) else
                [n // size for n in given]}  # fmt: skip

    return local


def cuts(*names: str) -> Local:
    """Return how the ends of a slice of a split dim are written on one rank."""

    def local(bound: dict, choice: Choice, size: int) -> dict:
        held = choice.wants[0]
        if not isinstance(held, Shard) or held.dim != bound["dim"]:
            return bound
        return {**bound, **{name: bound[name] // size for name in names}}

    return local


def strided(bound: dict, choice: Choice, size: int) -> dict:
    """Return the shape and the strides of a rank's part, which is contiguous."""
    bound = shape_of_output("size")(bound, choice, size)
    return {**bound, "stride": [bound["size"][1], 1]}


def unflattened(bound: dict, choice: Choice, size: int) -> dict:
    """Return the sizes of a dim that is taken apart, whose parts follow dim 1 of the output."""
    out, sizes = choice.outs[0], list(bound["sizes"])
    if isinstance(out, Shard) and out.dim >= 1:
        sizes[out.dim - 1] //= size
    return {**bound, "sizes": sizes}


def samples(bound: dict, choice: Choice, size: int) -> dict:
    """Return the number of samples that one rank has, where dim 0 is split."""
    held = choice.wants[0]
    split = isinstance(held, Shard) and held.dim == 0
    return {**bound, "N": bound["N"] // size} if split else bound


LOCAL: dict[object, Local] = {
    **dict.fromkeys(
        overloads("view.default _unsafe_view.default expand.default"), shape_of_output("size")
    ),
    aten.reshape.default: shape_of_output("shape"),
    aten._reshape_alias.default: strided,
    aten.unflatten.int: unflattened,
    **dict.fromkeys(overloads("split.Tensor unsafe_split.Tensor"), pieces("split_size")),
    **dict.fromkeys(overloads("split_with_sizes.default"), pieces("split_sizes")),
    aten.split.sizes: pieces("split_size"),
    aten.slice.Tensor: cuts("start", "end"),
    aten.narrow.default: cuts("start", "length"),
    **dict.fromkeys(
        overloads(
            "slice_backward.default select_backward.default diagonal_backward.default"
            " unfold_backward.default"
        ),
        shape_of_output("input_sizes"),
    ),
    **dict.fromkeys(
        overloads(
            "upsample_linear1d_backward.default upsample_nearest1d_backward.default"
            " upsample_nearest2d_backward.default upsample_bilinear2d_backward.default"
            " upsample_bicubic2d_backward.default"
        ),
        shape_of_output("input_size"),
    ),
    aten.unfold_backward.default: shape_of_output("input_sizes"),
    aten.native_group_norm.default: samples,
    aten.native_group_norm_backward.default: samples,
}
