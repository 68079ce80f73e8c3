"""Scaled dot product attention, whole: batch and heads may be split, nothing else."""

from __future__ import annotations

import torch

from autoshard.ir.placement import Placement
from autoshard.ir.rules.call import Call, Choice, Rule
from autoshard.ir.rules.factors import Factors, Labels, solve

aten = torch.ops.aten


def _sdpa(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``..hqd, ..hkd, ..hkv, ..hqk -> ..hqv``.

    With ``enable_gqa`` key and value have fewer heads: rank r's query heads then read rank r's
    key heads, since both are split in order.
    """
    rank = len(call.outs[0])
    lead: Labels = (*range(rank - 3), "h") if rank > 2 else ()
    # One key head for all query heads is broadcast: it needs no split.
    shared = rank > 2 and call.shapes[1][-3] == 1 != call.outs[0][-3]
    keys: Labels = (*lead[:-1], None) if shared else lead
    labels = [(*lead, "q", "d"), (*keys, "k", "d"), (*keys, "k", "v")]
    whole = frozenset({"q", "k", "d"})
    mask = call.index("attn_mask")
    if mask is not None:
        labels.append(_mask_labels(call.shapes[mask], call.outs[0], (*lead, "q", "k")))
    return solve(Factors(tuple(labels), ((*lead, "q", "v"),), whole=whole), call, ins)


def _mask_labels(shape: tuple[int, ...], out: tuple[int, ...], full: Labels) -> Labels:
    """Return the labels of a mask that is broadcast over batch and heads."""
    offset = len(full) - len(shape)
    return tuple(
        None if extent == 1 and out[offset + d] != 1 else full[offset + d]
        for d, extent in enumerate(shape)
    )


TABLE: dict[object, Rule] = {aten.scaled_dot_product_attention.default: _sdpa}
