"""Elementwise operators: every dimension may be split; some let partial sums through."""

from __future__ import annotations

import torch

from autoshard.ir.placement import Placement
from autoshard.ir.rules.call import Call, Choice, Rule
from autoshard.ir.rules.factors import Factors, broadcast, solve

aten = torch.ops.aten


def pointwise(*linear: tuple[int, ...]) -> Rule:
    """Return the rule of a broadcasting operator that is linear in each of these input sets."""
    groups = tuple(frozenset(group) for group in linear)

    def rule(call: Call, ins: tuple[Placement, ...]) -> Choice:
        out = call.outs[0]
        labels = tuple(tuple(range(len(shape))) for shape in call.outs)
        return solve(Factors(broadcast(call.shapes, out), labels, linear=groups), call, ins)

    return rule


def _add(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """A sum is jointly linear; with a number it is not (each rank would add the number)."""
    joint = ((0, 1),) if len(call.shapes) == 2 else ()
    return pointwise(*joint)(call, ins)


def _scale(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """A product is linear in either factor, a quotient in its numerator."""
    quotient = call.op in (aten.div.Tensor, aten.div.Scalar)
    return pointwise((0,), *(() if quotient else ((1,),)))(call, ins)


def _where(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """A selection is jointly linear in its two branches when both are tensors."""
    return pointwise(*(((1, 2),) if len(call.shapes) == 3 else ()))(call, ins)


def _masked_fill(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """Filling with zero is linear: this is how dropout and padding masks act."""
    return pointwise(*(((0,),) if call.arguments.get("value") == 0 else ()))(call, ins)


_NONLINEAR = """
    abs.default acos.default asin.default atan.default atan2.default
    bitwise_and.Scalar bitwise_and.Tensor bitwise_not.default bitwise_or.Tensor
    bitwise_or.Scalar bitwise_xor.Tensor __and__.Tensor __or__.Tensor __xor__.Tensor
    __and__.Scalar __or__.Scalar __lshift__.Scalar __rshift__.Scalar
    ceil.default celu.default clamp.default clamp.Tensor clamp_max.default clamp_min.default
    clip.default cos.default cosh.default
    elu.default eq.Scalar eq.Tensor erf.default erfc.default exp.default exp2.default
    expm1.default floor.default floor_divide.default fmod.Scalar fmod.Tensor
    ge.Scalar ge.Tensor gelu.default gt.Scalar gt.Tensor hardsigmoid.default hardswish.default
    hardtanh.default isfinite.default isinf.default isnan.default
    le.Scalar le.Tensor leaky_relu.default log.default log10.default log1p.default log2.default
    log_sigmoid.default logical_and.default logical_not.default logical_or.default
    logical_xor.default logit.default lt.Scalar lt.Tensor
    maximum.default minimum.default mish.default nan_to_num.default ne.Scalar ne.Tensor
    pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal.default relu.default relu6.default
    remainder.Scalar remainder.Tensor round.default rsqrt.default rsub.Scalar rsub.Tensor
    selu.default sgn.default sigmoid.default sign.default silu.default sin.default sinh.default
    softplus.default softshrink.default sqrt.default square.default tan.default tanh.default
    threshold.default trunc.default xlogy.Tensor special_expit.default
    to.dtype to.dtype_layout to.device to.other _to_copy.default div.Tensor_mode div.Scalar_mode
    bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar lerp.Scalar lerp.Tensor
    addcmul.default addcdiv.default fill.Scalar fill.Tensor copy.default
    full_like.default zeros_like.default ones_like.default empty_like.default
    min.other max.other hardshrink.default logaddexp.default hypot.default sinc.default
    clamp_min.Tensor clamp_max.Tensor log_sigmoid_forward.default
"""
_LINEAR = """
    neg.default clone.default contiguous.default alias.default detach.default mul.Scalar
    div.Scalar lift_fresh_copy.default positive.default
"""


def overloads(names: str) -> tuple[object, ...]:
    """Return the ATen overloads that these words name; a word this torch lacks is left out."""
    found = []
    for word in names.split():
        packet, overload = word.split(".")
        op = getattr(getattr(aten, packet, None), overload, None)
        if op is not None:
            found.append(op)
    return tuple(found)


TABLE: dict[object, Rule] = {
    **dict.fromkeys(overloads(_NONLINEAR), pointwise()),
    **dict.fromkeys(overloads(_LINEAR), pointwise((0,))),
    **dict.fromkeys(overloads("add.Tensor add.Scalar sub.Tensor sub.Scalar"), _add),
    **dict.fromkeys(overloads("mul.Tensor div.Tensor"), _scale),
    **dict.fromkeys(
        overloads("where.self where.ScalarOther where.ScalarSelf where.Scalar"), _where
    ),
    **dict.fromkeys(overloads("masked_fill.Scalar masked_fill.Tensor"), _masked_fill),
}
