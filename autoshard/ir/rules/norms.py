"""Normalisations over the last dims: those are whole, all dims before them may be split."""

from __future__ import annotations

import torch

from autoshard.ir.placement import Placement
from autoshard.ir.rules.call import Call, Choice, Rule
from autoshard.ir.rules.factors import Factors, Labels, solve
from autoshard.ops import add_layer_norm as _add_layer_norm  # noqa: F401  (registers the op)
from autoshard.ops import add_rms_norm as _add_rms_norm  # noqa: F401
from autoshard.ops.bias_dropout_add_layer_norm import bias_dropout_add_layer_norm

aten = torch.ops.aten
ours = torch.ops.autoshard
RNG = "rng"


def _norm(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``...h`` with parameters ``h``; statistics keep the dims before, with 1 for each of ``h``.

    A dropout inside follows the global element, so each rank draws its own part of one mask.
    """
    rank = len(call.shapes[0])
    shape = call.arguments.get("normalized_shape")
    tail = len(shape) if shape is not None else 1
    whole = frozenset(range(rank - tail, rank))
    labels = tuple(range(rank))
    ins_labels = [labels[rank - len(s) :] for s in call.shapes]
    if call.index("rng") is not None:
        ins_labels[call.index("rng")] = (RNG,)
    outs = tuple(_visible(labels, out, call.shapes[0]) for out in call.outs)
    return solve(Factors(tuple(ins_labels), outs, whole=whole | {RNG}), call, ins)


def _visible(labels: Labels, out: tuple[int, ...], shape: tuple[int, ...]) -> Labels:
    """Return the labels of an output: reduced dims have size 1 and no label."""
    return tuple(
        None if extent == 1 and shape[d] != 1 else labels[d] for d, extent in enumerate(out)
    )


def _group_norm(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``nc...``: only the samples are independent."""
    labels = tuple(range(len(call.shapes[0])))
    extra = tuple(("c",) * (len(s) == 1) for s in call.shapes[1:])
    whole = frozenset({*labels[1:], "c"})
    return solve(Factors((labels, *extra), (labels,), whole=whole), call, ins)


def _native_group_norm(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``nc..., c, c -> nc..., ng, ng``."""
    labels = tuple(range(len(call.shapes[0])))
    extra = (("c",),) * (len(call.shapes) - 1)
    whole = frozenset({*labels[1:], "c", "g"})
    return solve(Factors((labels, *extra), (labels, (0, "g"), (0, "g")), whole=whole), call, ins)


def _native_group_norm_backward(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``dy, x, mean ng, rstd ng, c -> dx, dc, dc``: parameters' gradients sum over samples."""
    labels = tuple(range(len(call.shapes[0])))
    extra = (("c",),) * (len(call.shapes) - 4)
    given = (labels, labels, (0, "g"), (0, "g"), *extra)
    outs = tuple(labels if len(s) == len(labels) else ("c",) for s in call.outs)
    whole = frozenset({*labels[1:], "c", "g"})
    factors = Factors(given, outs, sums=frozenset({0}), whole=whole, linear=(frozenset({0}),))
    return solve(factors, call, ins)


def _by_channel(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Batch norm in training: ``nc...`` with ``c``; samples are mixed, channels are not."""
    full = call.shapes[0]
    labels = tuple("c" if d == 1 else d for d in range(len(full)))
    given = tuple(labels if len(s) == len(full) else ("c",) for s in call.shapes)
    outs = tuple(labels if len(s) == len(full) else ("c",) for s in call.outs)
    whole = frozenset(labels) - {"c"}
    linear = (frozenset({0}),) if "grad_out" in call.arguments else ()
    return solve(Factors(given, outs, whole=whole, linear=linear), call, ins)


def _instance_norm(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """``nc...`` with ``c``: samples and channels are independent."""
    full = call.shapes[0]
    labels = ("n", "c", *range(2, len(full)))
    given = tuple(labels if len(s) == len(full) else ("c",) for s in call.shapes)
    return solve(Factors(given, (labels,), whole=frozenset(labels[2:])), call, ins)


TABLE: dict[object, Rule] = {
    aten.layer_norm.default: _norm,
    aten.native_layer_norm.default: _norm,
    aten.rms_norm.default: _norm,
    aten.group_norm.default: _group_norm,
    aten.native_group_norm.default: _native_group_norm,
    aten.native_group_norm_backward.default: _native_group_norm_backward,
    aten.native_batch_norm.default: _by_channel,
    aten.native_batch_norm_backward.default: _by_channel,
    aten.instance_norm.default: _instance_norm,
    ours.add_layer_norm.default: _norm,
    ours.add_rms_norm.default: _norm,
    bias_dropout_add_layer_norm: _norm,
}
