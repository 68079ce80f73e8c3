"""Reductions and scans: a sum over a split dimension is partial, all else needs it whole."""

from __future__ import annotations

from dataclasses import replace

import torch

from autoshard.ir.placement import PARTIAL, REPLICATE, Placement
from autoshard.ir.rules.call import Call, Choice, Rule
from autoshard.ir.rules.factors import NONE, Factors, Labels, is_split_last, solve
from autoshard.ir.rules.pointwise import overloads

aten = torch.ops.aten


def _reduce(call: Call, ins: tuple[Placement, ...], sums: bool) -> Choice:
    """``...d -> ...``: the reduced dimensions are summed or whole."""
    rank = len(call.shapes[0])
    gone = frozenset(call.dims() if "dim" in call.arguments else range(rank))
    keepdim = bool(call.arguments.get("keepdim"))
    out: Labels = tuple(
        None if dim in gone else dim for dim in range(rank) if keepdim or dim not in gone
    )
    factors = Factors(
        (tuple(range(rank)),),
        (out,) * len(call.outs),
        sums=gone if sums else frozenset(),
        whole=frozenset() if sums else gone,
        linear=(frozenset({0}),) if sums else (),
    )
    return solve(factors, call, ins)


def _sum(call: Call, ins: tuple[Placement, ...]) -> Choice:
    return _reduce(call, ins, sums=True)


def _mean(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """A mean of parts is not a part of the mean: it becomes a sum and a factor."""
    choice = _reduce(call, ins, sums=True)
    split_sum = PARTIAL in choice.outs and PARTIAL not in ins
    return replace(choice, instead="sum_then_scale") if split_sum else choice


def _whole(call: Call, ins: tuple[Placement, ...]) -> Choice:
    return _reduce(call, ins, sums=False)


def _logsumexp(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """A split last dim needs the form that speaks to the other ranks; see ops/vocab_logits."""
    if call.dims() == (len(call.shapes[0]) - 1,) and is_split_last(call, ins[0]):
        return Choice(ins, (REPLICATE,), instead="vocab_logsumexp")
    return _reduce(call, ins, sums=False)


def _softmax(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """A split last dim needs the form by way of a logsumexp over all ranks."""
    if call.dim() == len(call.shapes[0]) - 1 and is_split_last(call, ins[0]):
        return Choice(ins, ins, instead="vocab_softmax")
    return along("dim")(call, ins)


def _triangle(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """The last two dims decide which elements stay."""
    labels = tuple(range(len(call.shapes[0])))
    whole = frozenset(labels[-2:])
    return solve(Factors((labels,), (labels,), whole=whole, linear=(frozenset({0}),)), call, ins)


def _diff(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Differences along a dim, which is whole in the value and in what is put around it."""
    labels = tuple(range(len(call.shapes[0])))
    factors = Factors(
        (labels,) * len(ins),
        (labels,),
        whole=frozenset({call.dim()}),
        linear=(frozenset(range(len(ins))),),
    )
    return solve(factors, call, ins)


def _histogram(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Counts of parts add up where the bins don't depend on the values."""
    labels = tuple(range(len(call.shapes[0])))
    fixed = call["min"] != call["max"]
    every = frozenset(labels)
    factors = Factors(
        (labels,), ((None,),), sums=every if fixed else NONE, whole=NONE if fixed else every
    )
    return solve(factors, call, ins)


def along(*names: str, linear: bool = False) -> Rule:
    """Return the rule of an operator that keeps its shape and needs the named dims whole."""

    def rule(call: Call, ins: tuple[Placement, ...]) -> Choice:
        rank = len(call.shapes[0])
        whole = frozenset(dim for name in names for dim in call.dims(name)) if rank else frozenset()
        groups = (frozenset({0}),) if linear else ()
        labels = tuple(range(rank))
        outs = (labels,) * len(call.outs)
        return solve(Factors((labels,), outs, whole=whole, linear=groups), call, ins)

    return rule


TABLE: dict[object, Rule] = {
    **dict.fromkeys(overloads("sum.default sum.dim_IntList"), _sum),
    **dict.fromkeys(overloads("mean.default mean.dim"), _mean),
    **dict.fromkeys(
        overloads(
            "amax.default amin.default max.default min.default max.dim min.dim argmax.default"
            " argmin.default any.default any.dim any.dims all.default all.dim all.dims prod.default"
            " prod.dim_int var.correction var.dim std.correction std.dim var_mean.correction"
            " norm.ScalarOpt_dim linalg_vector_norm.default median.dim"
            " count_nonzero.dim_IntList count_nonzero.default aminmax.default var_mean.dim"
        ),
        _whole,
    ),
    **dict.fromkeys(
        overloads(
            "_safe_softmax.default logcumsumexp.default cumprod.default sort.default"
            " argsort.default glu.default cummax.default cummin.default"
        ),
        along("dim"),
    ),
    aten.logsumexp.default: _logsumexp,
    **dict.fromkeys(
        overloads("softmax.int log_softmax.int _softmax.default _log_softmax.default"), _softmax
    ),
    **dict.fromkeys(overloads("cumsum.default"), along("dim", linear=True)),
    **dict.fromkeys(overloads("diff.default"), _diff),
    **dict.fromkeys(overloads("histc.default"), _histogram),
    **dict.fromkeys(overloads("flip.default"), along("dims", linear=True)),
    **dict.fromkeys(overloads("roll.default"), along("dims", linear=True)),
    **dict.fromkeys(overloads("tril.default triu.default"), _triangle),
    **dict.fromkeys(overloads("topk.default kthvalue.default"), along("dim")),
}
