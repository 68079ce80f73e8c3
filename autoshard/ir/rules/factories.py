"""Operators that make values from sizes: every rank makes the same whole value."""

from __future__ import annotations

import torch

from autoshard.ir.placement import REPLICATE, Placement
from autoshard.ir.rules.call import Call, Choice, Rule
from autoshard.ir.rules.pointwise import overloads

aten = torch.ops.aten


def _constant(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """A constant is the same everywhere, so each rank may as well make its part."""
    uniform = tuple(d for d, extent in enumerate(call.outs[0]) if extent != 1)
    return Choice(ins, (REPLICATE,), uniform=uniform)


def _counted(call: Call, ins: tuple[Placement, ...]) -> Choice:
    return Choice(ins, (REPLICATE,) * len(call.outs))


TABLE: dict[object, Rule] = {
    **dict.fromkeys(
        overloads(
            "full.default zeros.default ones.default empty.memory_format scalar_tensor.default"
            " new_ones.default new_zeros.default new_full.default new_empty.default"
        ),
        _constant,
    ),
    **dict.fromkeys(
        overloads(
            "arange.default arange.start arange.start_step eye.default eye.m linspace.default"
            " tril_indices.default triu_indices.default"
        ),
        _counted,
    ),
}
