"""One call for every operator of the rule table; shapes are drawn anew for each test.

A case is a function that returns ``(op, *args)``, with a dict of keywords at the end where needed.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from autoshard.ir.rules.pointwise import overloads

aten = torch.ops.aten
Case = Callable[[], tuple]


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def flags(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) < 0.5


def dims(count: int) -> tuple[int, ...]:
    """Return random extents that two and four ranks divide, in two blocks too."""
    return tuple(random.choice((4, 8, 12, 16)) for _ in range(count))


def on(names: str, *args: Callable[[tuple], object]) -> dict[str, Case]:
    """Return a case for each overload: the op on values made for one random shape."""

    def case(op: object) -> Case:
        def make() -> tuple:
            shape = dims(random.choice((1, 2, 3)))
            return (op, *(a(shape) if callable(a) else a for a in args))

        return make

    return {str(op): case(op) for op in overloads(names)}


def same(shape: tuple) -> torch.Tensor:
    return f(*shape)


def odd(shape: tuple) -> torch.Tensor:
    """Return numbers some of which are zero, infinite or none: what few operators tell apart."""
    value, kind = f(*shape), ints(5, *shape)
    for place, other in enumerate((0.0, float("inf"), float("nan"))):
        value = value.masked_fill(kind == place, other)
    return value


def coarse(shape: tuple) -> torch.Tensor:
    """Return small whole numbers as floats, many of them equal."""
    return ints(3, *shape).double()


def positive(shape: tuple) -> torch.Tensor:
    return f(*shape).abs() + 0.1


def inside(shape: tuple) -> torch.Tensor:
    return f(*shape).sigmoid()


def whole(shape: tuple) -> torch.Tensor:
    return ints(16, *shape)


def flag(shape: tuple) -> torch.Tensor:
    return flags(*shape)


def few(shape: tuple) -> torch.Tensor:
    """Return rows of flags, each all set, all unset or mixed."""
    return (ints(3, 8, *shape[:-1], 1) + flags(8, *shape)) > 1


def last(shape: tuple) -> torch.Tensor:
    """Return a row that broadcasts over the other dims."""
    return f(shape[-1])


POINTWISE = {
    **on(
        "neg.default relu.default gelu.default silu.default tanh.default sigmoid.default"
        " exp.default sin.default cos.default erf.default abs.default sgn.default square.default"
        " clone.default leaky_relu.default elu.default"
        " softplus.default hardswish.default mish.default ceil.default floor.default round.default"
        " atan.default celu.default cosh.default erfc.default exp2.default expm1.default"
        " hardsigmoid.default hardtanh.default log_sigmoid.default relu6.default"
        " selu.default sign.default sinh.default"
        " softshrink.default tan.default trunc.default hardshrink.default sinc.default"
        " special_expit.default contiguous.default alias.default detach.default"
        " lift_fresh_copy.default positive.default _to_copy.default zeros_like.default"
        " ones_like.default empty_like.default log_sigmoid_forward.default",
        same,
    ),
    **on(
        "logical_not.default isnan.default isinf.default isfinite.default nan_to_num.default", odd
    ),
    **on(
        "log.default log10.default log1p.default log2.default sqrt.default rsqrt.default"
        " reciprocal.default",
        positive,
    ),
    **on("acos.default asin.default logit.default", inside),
    **on(
        "add.Tensor sub.Tensor mul.Tensor div.Tensor maximum.default minimum.default lt.Tensor"
        " le.Tensor gt.Tensor ge.Tensor atan2.default fmod.Tensor"
        " remainder.Tensor rsub.Tensor min.other max.other logaddexp.default hypot.default"
        " copy.default floor_divide.default clamp_min.Tensor clamp_max.Tensor",
        same,
        last,
    ),
    **on(
        "add.Scalar sub.Scalar mul.Scalar div.Scalar rsub.Scalar lt.Scalar"
        " le.Scalar gt.Scalar ge.Scalar fmod.Scalar remainder.Scalar clamp_max.default"
        " fill.Scalar full_like.default pow.Tensor_Scalar",
        same,
        2.0,
    ),
    **on("clamp_min.default", same, 0.1),
    **on("eq.Tensor ne.Tensor", coarse, lambda s: coarse(s[-1:])),
    **on("eq.Scalar ne.Scalar", coarse, 2.0),
    **on("pow.Tensor_Tensor xlogy.Tensor", positive, same),
    **on("pow.Scalar", 2.0, same),
    **on("clamp.default clip.default threshold.default", same, -0.5, 0.5),
    **on("clamp.Tensor", same, lambda s: f(*s) - 1, last),
    **on("lerp.Scalar", same, same, 0.3),
    **on("lerp.Tensor addcmul.default addcdiv.default", same, positive, positive),
    **on("fill.Tensor", same, lambda s: f()),
    **on("to.dtype", same, torch.float32),
    **on("to.dtype_layout", same),
    **on("to.device", same, "cpu", torch.float64),
    **on("to.other", whole, same),
    **on(
        "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor __or__.Tensor"
        " __xor__.Tensor",
        whole,
        whole,
    ),
    **on(
        "bitwise_and.Scalar bitwise_or.Scalar __and__.Scalar __or__.Scalar __lshift__.Scalar"
        " __rshift__.Scalar bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar",
        whole,
        3,
    ),
    **on("bitwise_not.default", whole),
    **on("logical_and.default logical_or.default logical_xor.default", flag, flag),
    **on("where.self", flag, same, last),
    **on("where.ScalarOther", flag, same, -9.0),
    **on("where.ScalarSelf", flag, -9.0, same),
    **on("where.Scalar", flag, -9.0, 2.0),
    **on("masked_fill.Scalar", same, flag, -9.0),
    **on("masked_fill.Tensor", same, flag, lambda s: f()),
    "floored quotient": lambda: (aten.div.Tensor_mode, f(4, 8), f(8), {"rounding_mode": "floor"}),
    "floored quotient by a number": lambda: (
        aten.div.Scalar_mode,
        f(4, 8),
        3.0,
        {"rounding_mode": "floor"},
    ),
    "add of a column": lambda: (aten.add.Tensor, f(4, 8), f(4, 1)),
    "add of a number": lambda: (aten.add.Tensor, f(4, 8), 3.0),
    "mul of a table": lambda: (aten.mul.Tensor, f(2, 4, 8), f(1, 8)),
    "mul of a number": lambda: (aten.mul.Tensor, f(4, 8), 2.0),
    "div by a number": lambda: (aten.div.Tensor, f(4, 8), 2.0),
    "masked fill with zero": lambda: (aten.masked_fill.Scalar, f(4, 8), flags(1, 8), 0),
}
PRODUCTS: dict[str, Case] = {
    "mm": lambda: (aten.mm.default, f(4, 8), f(8, 4)),
    "mv": lambda: (aten.mv.default, f(4, 8), f(8)),
    "dot": lambda: (aten.dot.default, f(8), f(8)),
    "bmm": lambda: (aten.bmm.default, f(4, 2, 8), f(4, 8, 2)),
    "matmul of heads": lambda: (aten.matmul.default, f(2, 4, 2, 8), f(2, 4, 8, 2)),
    "matmul with a matrix": lambda: (aten.matmul.default, f(2, 4, 8), f(8, 4)),
    "matmul broadcast": lambda: (aten.matmul.default, f(4, 2, 8), f(1, 8, 4)),
    "matmul with a vector": lambda: (aten.matmul.default, f(4, 8), f(8)),
    "linear": lambda: (aten.linear.default, f(2, 4, 8), f(4, 8)),
    "linear with bias": lambda: (aten.linear.default, f(2, 4, 8), f(4, 8), f(4)),
    "addmm": lambda: (aten.addmm.default, f(4), f(2, 8), f(8, 4)),
    "addmm of a matrix": lambda: (aten.addmm.default, f(2, 4), f(2, 8), f(8, 4)),
    "baddbmm": lambda: (aten.baddbmm.default, f(4, 1, 2), f(4, 2, 4), f(4, 4, 2)),
    "einsum": lambda: (aten.einsum.default, "bthd,bshd->bhts", [f(2, 4, 4, 8), f(2, 2, 4, 8)]),
    "einsum with dots": lambda: (aten.einsum.default, "...ij,jk", [f(2, 4, 8), f(8, 4)]),
    "einsum of a diagonal": lambda: (aten.einsum.default, "iij->j", [f(4, 4, 8)]),
    "einsum broadcast": lambda: (aten.einsum.default, "ij,jk->ik", [f(4, 8), f(1, 4)]),
    "einsum of three": lambda: (aten.einsum.default, "ab,bc,cd->ad", [f(2, 4), f(4, 8), f(8, 4)]),
    "tensordot": lambda: (aten.tensordot.default, f(2, 4, 8), f(8, 4, 2), [2, 1], [0, 1]),
    "cdist": lambda: (aten.cdist.default, f(2, 4, 8), f(2, 8, 8)),
    "cdist forward": lambda: (aten._cdist_forward.default, f(2, 4, 8), f(2, 8, 8), 2.0, None),
}
REDUCTIONS: dict[str, Case] = {
    **on(
        "sum.default mean.default any.default all.default max.default min.default prod.default"
        " count_nonzero.default aminmax.default",
        same,
    ),
    **on("sum.dim_IntList mean.dim amax.default amin.default", same, [-1], True),
    **on("sum.dim_IntList var.dim std.dim var_mean.dim logsumexp.default", same, [-1]),
    **on("any.dim all.dim", few, -1),
    **on("any.dims all.dims", few, [-1]),
    **on("count_nonzero.dim_IntList", flag, [-1]),
    **on(
        "max.dim min.dim argmax.default argmin.default median.dim prod.dim_int"
        " softmax.int log_softmax.int _safe_softmax.default cumsum.default cumprod.default"
        " logcumsumexp.default sort.default argsort.default glu.default cummax.default"
        " cummin.default",
        same,
        -1,
    ),
    **on("_softmax.default _log_softmax.default", same, -1, False),
    **on("var.correction std.correction var_mean.correction", same, [-1]),
    **on("norm.ScalarOpt_dim", same, 2, [-1]),
    **on("linalg_vector_norm.default", same, 2, [-1]),
    **on("topk.default kthvalue.default", same, 2),
    **on("flip.default", same, [-1]),
    **on("roll.default", same, [1], [-1]),
    **on("diff.default", same, 1, -1),
    "diff with ends": lambda: (aten.diff.default, f(4, 8), 1, -1, f(4, 1), f(4, 2)),
    "roll of all": lambda: (aten.roll.default, f(4, 8), [1]),
    "sum of rows": lambda: (aten.sum.dim_IntList, f(4, 8), [0]),
    "mean of rows": lambda: (aten.mean.dim, f(4, 8), [-1], True),
    "softmax": lambda: (aten.softmax.int, f(2, 4, 8), -1),
    "lower triangle": lambda: (aten.tril.default, f(2, 4, 8)),
    "upper triangle": lambda: (aten.triu.default, f(2, 4, 8)),
    "histogram": lambda: (aten.histc.default, f(4, 8), 8, -2, 2),
    "histogram of its own range": lambda: (aten.histc.default, f(4, 8), 8),
}
NORMS: dict[str, Case] = {
    "layer norm": lambda: (aten.layer_norm.default, f(2, 4, 8), [8], f(8), f(8)),
    "native layer norm": lambda: (aten.native_layer_norm.default, f(4, 8), [8], f(8), f(8), 1e-5),
    "rms norm": lambda: (aten.rms_norm.default, f(2, 4, 8), [8], f(8)),
    "group norm": lambda: (aten.group_norm.default, f(4, 8, 2), 2, f(8), f(8)),
    "native group norm": lambda: (
        aten.native_group_norm.default, f(4, 8, 2), f(8), f(8), 4, 8, 2, 2, 1e-5
    ),
    "instance norm": lambda: (
        aten.instance_norm.default, f(4, 8, 4), f(8), f(8), None, None, True, 0.1, 1e-5, False
    ),
    "batch norm": lambda: (
        aten.native_batch_norm.default, f(4, 8, 4), f(8), f(8), None, None, True, 0.1, 1e-5
    ),
    "add layer norm": lambda: (
        torch.ops.autoshard.add_layer_norm.default, f(2, 4, 8), f(2, 4, 8), f(8), f(8), 1e-5
    ),
    "add rms norm": lambda: (
        torch.ops.autoshard.add_rms_norm.default, f(2, 4, 8), f(2, 4, 8), f(8), 1e-5
    ),
}  # fmt: skip
VIEWS: dict[str, Case] = {
    "permute": lambda: (aten.permute.default, f(2, 4, 8), [2, 0, 1]),
    "transpose": lambda: (aten.transpose.int, f(2, 4, 8), -1, 0),
    "t": lambda: (aten.t.default, f(4, 8)),
    "unsqueeze": lambda: (aten.unsqueeze.default, f(4, 8), -2),
    "squeeze": lambda: (aten.squeeze.dim, f(4, 1, 8), 1),
    "squeeze of dims": lambda: (aten.squeeze.dims, f(1, 4, 1, 8), [0, 1, 2]),
    "squeeze of all": lambda: (aten.squeeze.default, f(4, 1, 8)),
    "view": lambda: (aten.view.default, f(2, 4, 8), [8, 8]),
    "unsafe view": lambda: (aten._unsafe_view.default, f(8, 8), [2, 4, 8]),
    "reshape": lambda: (aten.reshape.default, f(2, 24), [2, 3, 8]),
    "flatten": lambda: (aten.flatten.using_ints, f(2, 4, 8), 1),
    "unflatten": lambda: (aten.unflatten.int, f(2, 32), 1, [4, 8]),
    "view as": lambda: (aten.view_as.default, f(2, 4, 8), f(8, 8)),
    "reshape alias": lambda: (aten._reshape_alias.default, f(4, 8), [4, 8], [8, 1]),
    "expand": lambda: (aten.expand.default, f(1, 4, 8), [2, 4, 8]),
    "broadcast tensors": lambda: (aten.broadcast_tensors.default, [f(4, 8), f(8)]),
    "repeat": lambda: (aten.repeat.default, f(4, 8), [2, 1, 2]),
    "tile": lambda: (aten.tile.default, f(4, 8), [1, 2]),
    "repeat interleave": lambda: (aten.repeat_interleave.self_int, f(4, 8), 3, -1),
    "diagonal": lambda: (aten.diagonal.default, f(4, 8, 8), 1, 1, 2),
    "pixel shuffle": lambda: (aten.pixel_shuffle.default, f(4, 8, 4, 4), 2),
    "pixel unshuffle": lambda: (aten.pixel_unshuffle.default, f(4, 2, 4, 4), 2),
    "meshgrid": lambda: (aten.meshgrid.indexing, [f(4), f(8), f(2)], {"indexing": "xy"}),
    "split": lambda: (aten.split.Tensor, f(4, 24), 8, 1),
    "split with sizes": lambda: (aten.split_with_sizes.default, f(4, 24), [8, 16], 1),
    "split into sizes": lambda: (aten.split.sizes, f(4, 24), [16, 8], 1),
    "chunk": lambda: (aten.chunk.default, f(4, 16), 2, 1),
    "unsafe split": lambda: (aten.unsafe_split.Tensor, f(4, 16), 8, 1),
    "unsafe chunk": lambda: (aten.unsafe_chunk.default, f(4, 16), 2, 1),
    "tensor split": lambda: (aten.tensor_split.sections, f(4, 16), 2, 1),
    "unbind": lambda: (aten.unbind.int, f(3, 4, 8), 0),
    "select": lambda: (aten.select.int, f(4, 8, 2), 1, 3),
    "slice of a whole dim": lambda: (aten.slice.Tensor, f(4, 7), 1, 2, 5),
    "slice of blocks": lambda: (aten.slice.Tensor, f(4, 16), 1, 8, 16),
    "narrow": lambda: (aten.narrow.default, f(4, 16), 1, 0, 8),
    "cat": lambda: (aten.cat.default, [f(4, 8), f(4, 8)], 1),
    "stack": lambda: (aten.stack.default, [f(4, 8), f(4, 8)], 1),
    "pad": lambda: (aten.pad.default, f(4, 8), [1, 2]),
    "pad with ones": lambda: (aten.pad.default, f(4, 8), [1, 2], "constant", 1.0),
    "constant pad": lambda: (aten.constant_pad_nd.default, f(4, 8), [1, 2]),
    "constant pad that shifts": lambda: (aten.constant_pad_nd.default, f(4, 8), [0, 0, 1, -1]),
    "pad that shifts": lambda: (aten.pad.default, f(4, 8), [-1, 1]),
    "reflection pad": lambda: (aten.reflection_pad1d.default, f(2, 4, 8), [1, 2]),
    "reflection pad in 2d": lambda: (aten.reflection_pad2d.default, f(2, 4, 4, 8), [1, 2, 1, 1]),
    "replication pad": lambda: (aten.replication_pad1d.default, f(2, 4, 8), [1, 2]),
    "replication pad in 2d": lambda: (aten.replication_pad2d.default, f(2, 4, 4, 8), [1, 2, 1, 1]),
    "unfold": lambda: (aten.unfold.default, f(4, 8), 1, 3, 2),
    "slice scatter": lambda: (aten.slice_scatter.default, f(4, 8), f(4, 3), 1, 2, 5),
    "select scatter": lambda: (aten.select_scatter.default, f(4, 8), f(4), 1, 2),
}
LOOKUPS: dict[str, Case] = {
    "embedding": lambda: (aten.embedding.default, f(8, 4), ints(8, 4, 2)),
    "gather": lambda: (aten.gather.default, f(4, 8), 1, ints(8, 4, 4)),
    "gather of fewer rows": lambda: (aten.gather.default, f(8, 8), 1, ints(8, 4, 4)),
    "index select": lambda: (aten.index_select.default, f(4, 8), 1, ints(8, 4)),
    "index of a dim": lambda: (aten.index.Tensor, f(4, 8), [None, ints(8, 4)]),
    "index of pairs": lambda: (aten.index.Tensor, f(4, 8, 2), [ints(4, 4, 1), ints(8, 2)]),
    "index apart": lambda: (aten.index.Tensor, f(4, 2, 8), [ints(4, 4), None, ints(8, 4)]),
    "one hot": lambda: (aten.one_hot.default, ints(8, 4, 8), 8),
    "bucketize": lambda: (aten.bucketize.Tensor, f(4, 8), f(4).sort().values),
    "put": lambda: (aten.index_put.default, f(4, 8), [None, ints(8, 4)], f(4, 4)),
    "put added": lambda: (aten.index_put.default, f(8, 4), [ints(8, 4, 2)], f(4, 2, 4), True),
    "put added to zeros": lambda: (
        aten.index_put.default, zeros(8, 4), [ints(8, 4, 2)], f(4, 2, 4), True
    ),
    "put in pairs": lambda: (
        aten.index_put.default, zeros(4, 8, 4), [ints(4, 4), ints(8, 4)], f(4, 1), True
    ),
    "scatter": lambda: (aten.scatter.src, f(4, 8), 1, permutations(4, 8), f(4, 8)),
    "scatter of a part": lambda: (aten.scatter.src, f(8, 8), 1, permutations(4, 8), f(4, 16)),
    "scatter of a number": lambda: (aten.scatter.value, f(4, 8), 1, permutations(4, 8)[:, :4], 2.0),
    "scatter add": lambda: (aten.scatter_add.default, f(4, 8), 1, ints(8, 4, 4), f(4, 4)),
    "scatter add to zeros": lambda: (
        aten.scatter_add.default, zeros(4, 8), 0, ints(4, 4, 8), f(4, 8)
    ),
    "scatter add of a part": lambda: (
        aten.scatter_add.default, zeros(4, 8), 1, ints(8, 4, 4), f(4, 8)
    ),
    "index add": lambda: (aten.index_add.default, f(4, 8), 1, ints(8, 4), f(4, 4)),
    "index add to zeros": lambda: (aten.index_add.default, zeros(4, 8), 1, ints(8, 4), f(4, 4)),
    "index copy": lambda: (aten.index_copy.default, f(4, 8), 1, torch.randperm(8)[:4], f(4, 4)),
    "masked scatter": lambda: (aten.masked_scatter.default, f(4, 8), flags(4, 8), f(4, 8)),
}  # fmt: skip


def permutations(rows: int, length: int) -> torch.Tensor:
    """Return indices without repeats in a row: what repeats is written in no defined order."""
    return torch.stack([torch.randperm(length) for _ in range(rows)])


def attention(*, mask: tuple[int, ...] | None = None, keys: int = 4) -> tuple:
    query, key, value = f(2, 4, 2, 8), f(2, keys, 2, 8), f(2, keys, 2, 8)
    extra = () if mask is None else (f(*mask),)
    return aten.scaled_dot_product_attention.default, query, key, value, *extra


ATTENTION: dict[str, Case] = {
    "attention": attention,
    "attention with a mask": lambda: attention(mask=(2, 1, 2, 2)),
    "attention with one key head": lambda: attention(keys=1),
}
