"""Every placement rule against the real operator, in float64, for all placements of its inputs."""

from __future__ import annotations

import pytest
import torch

from autoshard.ir.placement import PARTIAL, REPLICATE, Shard
from autoshard.ir.rules import table
from autoshard.ir.rules.call import Call, Choice, TensorRef
from autoshard.ir.rules.factors import Factors, solve
from tests.ir.rule_harness import check_rule

aten = torch.ops.aten


def f(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def flags(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) < 0.5


UNARY = (
    *("neg", "relu", "gelu", "silu", "tanh", "sigmoid", "exp", "sin", "cos", "erf", "abs", "sgn"),
    *("square", "clone", "logical_not", "isnan", "leaky_relu", "elu", "softplus", "hardswish"),
    *("mish", "ceil", "floor", "round"),
)
CASES = {
    **{name: lambda n=name: (getattr(aten, n).default, f(4, 8)) for name in UNARY},
    "add": lambda: (aten.add.Tensor, f(4, 8), f(4, 8)),
    "add of a row": lambda: (aten.add.Tensor, f(4, 8), f(8)),
    "add of a column": lambda: (aten.add.Tensor, f(4, 8), f(4, 1)),
    "add of a number": lambda: (aten.add.Tensor, f(4, 8), 3.0),
    "sub": lambda: (aten.sub.Tensor, f(4, 8), f(4, 8)),
    "rsub": lambda: (aten.rsub.Scalar, f(4, 8), 1.0),
    "mul": lambda: (aten.mul.Tensor, f(4, 8), f(4, 8)),
    "mul of a table": lambda: (aten.mul.Tensor, f(2, 4, 8), f(1, 8)),
    "mul of a number": lambda: (aten.mul.Tensor, f(4, 8), 2.0),
    "div": lambda: (aten.div.Tensor, f(4, 8), f(4, 8)),
    "div by a number": lambda: (aten.div.Tensor, f(4, 8), 2.0),
    "pow": lambda: (aten.pow.Tensor_Scalar, f(4, 8), 3.0),
    "maximum": lambda: (aten.maximum.default, f(4, 8), f(4, 8)),
    "lt": lambda: (aten.lt.Tensor, f(4, 8), f(8)),
    "clamp": lambda: (aten.clamp.default, f(4, 8), -0.5, 0.5),
    "where": lambda: (aten.where.self, flags(4, 8), f(4, 8), f(4, 8)),
    "where a number": lambda: (aten.where.ScalarOther, flags(4, 8), f(4, 8), -9.0),
    "masked fill": lambda: (aten.masked_fill.Scalar, f(4, 8), flags(4, 8), -9.0),
    "masked fill with zero": lambda: (aten.masked_fill.Scalar, f(4, 8), flags(1, 8), 0),
    "cast": lambda: (aten._to_copy.default, f(4, 8)),
    "mm": lambda: (aten.mm.default, f(4, 8), f(8, 4)),
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
    "sum": lambda: (aten.sum.default, f(4, 8)),
    "sum of rows": lambda: (aten.sum.dim_IntList, f(4, 8), [1]),
    "sum kept": lambda: (aten.sum.dim_IntList, f(4, 8), [-1], True),
    "mean of rows": lambda: (aten.mean.dim, f(4, 8), [-1], True),
    "amax": lambda: (aten.amax.default, f(4, 8), [1]),
    "max": lambda: (aten.max.dim, f(4, 8), 1),
    "argmax": lambda: (aten.argmax.default, f(4, 8), 1),
    "variance": lambda: (aten.var.correction, f(4, 8), [1]),
    "any": lambda: (aten.any.dim, flags(4, 8), 1),
    "softmax": lambda: (aten.softmax.int, f(2, 4, 8), -1),
    "log softmax": lambda: (aten.log_softmax.int, f(4, 8), 1),
    "cumsum": lambda: (aten.cumsum.default, f(4, 8), 1),
    "flip": lambda: (aten.flip.default, f(4, 8), [1]),
    "diff": lambda: (aten.diff.default, f(4, 8), 1, -1),
    "lower triangle": lambda: (aten.tril.default, f(2, 4, 8)),
    "topk": lambda: (aten.topk.default, f(4, 8), 2),
    "layer norm": lambda: (aten.layer_norm.default, f(2, 4, 8), [8], f(8), f(8)),
    "native layer norm": lambda: (aten.native_layer_norm.default, f(4, 8), [8], f(8), f(8), 1e-5),
    "rms norm": lambda: (aten.rms_norm.default, f(2, 4, 8), [8], f(8)),
    "group norm": lambda: (aten.group_norm.default, f(4, 8, 2), 2, f(8), f(8)),
    "permute": lambda: (aten.permute.default, f(2, 4, 8), [2, 0, 1]),
    "transpose": lambda: (aten.transpose.int, f(2, 4, 8), -1, 0),
    "t": lambda: (aten.t.default, f(4, 8)),
    "unsqueeze": lambda: (aten.unsqueeze.default, f(4, 8), -2),
    "squeeze": lambda: (aten.squeeze.dim, f(4, 1, 8), 1),
    "select": lambda: (aten.select.int, f(4, 8, 2), 1, 3),
    "slice of a whole dim": lambda: (aten.slice.Tensor, f(4, 7), 1, 2, 5),
    "unbind": lambda: (aten.unbind.int, f(3, 4, 8), 0),
    "cat": lambda: (aten.cat.default, [f(4, 8), f(4, 8)], 1),
    "stack": lambda: (aten.stack.default, [f(4, 8), f(4, 8)], 1),
    "pad": lambda: (aten.pad.default, f(4, 8), [1, 2]),
    "pad with ones": lambda: (aten.pad.default, f(4, 8), [1, 2], "constant", 1.0),
    "unfold": lambda: (aten.unfold.default, f(4, 8), 1, 3, 2),
    "slice scatter": lambda: (aten.slice_scatter.default, f(4, 8), f(4, 3), 1, 2, 5),
    "select scatter": lambda: (aten.select_scatter.default, f(4, 8), f(4), 1, 2),
    "embedding": lambda: (aten.embedding.default, f(8, 4), ints(8, 4, 2)),
    "gather": lambda: (aten.gather.default, f(4, 8), 1, ints(8, 4, 4)),
    "index select": lambda: (aten.index_select.default, f(4, 8), 1, ints(8, 4)),
    "index of a dim": lambda: (aten.index.Tensor, f(4, 8), [None, ints(8, 4)]),
    "index of pairs": lambda: (aten.index.Tensor, f(4, 8, 2), [ints(4, 4, 1), ints(8, 2)]),
    "index apart": lambda: (aten.index.Tensor, f(4, 2, 8), [ints(4, 4), None, ints(8, 4)]),
    "cross entropy": lambda: (aten.cross_entropy_loss.default, f(4, 8), ints(8, 4), None, 0),
    "summed cross entropy": lambda: (
        aten.cross_entropy_loss.default, f(4, 8), ints(8, 4), None, 2
    ),
    "mean cross entropy": lambda: (aten.cross_entropy_loss.default, f(4, 8), ints(8, 4)),
    "log likelihood": lambda: (aten.nll_loss_nd.default, f(4, 8), ints(8, 4), None, 2),
    "summed squares": lambda: (aten.mse_loss.default, f(4, 8), f(4, 8), 2),
    "mean squares": lambda: (aten.mse_loss.default, f(4, 8), f(4, 8)),
    "convolution": lambda: (aten.conv2d.default, f(4, 2, 3, 3), f(8, 2, 2, 2), f(8)),
    "attention": lambda: (
        aten.scaled_dot_product_attention.default, f(2, 4, 2, 8), f(2, 4, 2, 8), f(2, 4, 2, 8)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_parts_of_an_operator_make_its_whole(name: str) -> None:
    check_rule(*CASES[name]())


@pytest.mark.parametrize("name", ["mul", "linear", "softmax", "layer norm", "permute", "sum"])
def test_four_ranks_are_like_two(name: str) -> None:
    check_rule(*CASES[name](), size=4)


def attention(mask: torch.Tensor) -> tuple:
    op = aten.scaled_dot_product_attention.default
    return op, f(2, 4, 2, 8), f(2, 4, 2, 8), f(2, 4, 2, 8), mask


def test_a_mask_is_broadcast_over_split_heads() -> None:
    outs = check_rule(*attention(f(2, 1, 2, 2)))
    assert (Shard(1),) in outs


def test_shared_key_heads_are_split_with_their_query_heads() -> None:
    op = aten.scaled_dot_product_attention.default
    outs = check_rule(op, f(2, 8, 2, 4), f(2, 4, 2, 4), f(2, 4, 2, 4), enable_gqa=True)
    assert (Shard(1),) in outs


def _local_shape(name: str):
    def local(bound: dict, choice, size: int) -> dict:
        shape = list(bound[name])
        for out in choice.outs[:1]:
            if isinstance(out, Shard):
                shape[out.dim] //= size
        return {**bound, name: shape}

    return local


RESHAPES = (
    ((2, 8, 4), (16, 4)),
    ((16, 4), (2, 8, 4)),
    ((2, 4, 32), (2, 4, 8, 4)),
    ((2, 4, 8, 4), (2, 4, 32)),
    ((2, 24), (2, 3, 8)),
    ((2, 3, 8), (2, 24)),
    ((2, 4, 4, 2), (8, 8)),
    ((4, 8), (1, 4, 8)),
    ((8, 4), (32,)),
    ((2, 12), (2, 3, 2, 2)),
)


@pytest.mark.parametrize(("before", "after"), RESHAPES, ids=str)
def test_a_reshape_carries_its_cut_or_gives_it_up(before: tuple, after: tuple) -> None:
    check_rule(aten.reshape.default, f(*before), list(after), local=_local_shape("shape"))


def test_an_expanded_value_is_split_with_its_source() -> None:
    check_rule(aten.expand.default, f(1, 4, 8), [2, 4, 8], local=_local_shape("size"))


def call(op: object, *shapes: tuple, outs: tuple, size: int = 2, **arguments: object) -> Call:
    names = [a.name for a in op._schema.arguments]
    bound = {n: TensorRef(i) for i, n in enumerate(names[: len(shapes)])}
    return Call(op, {**bound, **arguments}, shapes, outs, size)


def test_a_packed_weight_is_cut_only_at_its_blocks() -> None:
    op = aten.split_with_sizes.default
    pieces = call(op, (2, 24), outs=((2, 8),) * 3, split_sizes=[8] * 3, dim=1)
    plain = table.choose(pieces, (Shard(1),))
    assert (plain.refusal, plain.wants) == ("packed", (REPLICATE,))
    packed = table.choose(pieces, (Shard(1, (8, 8, 8)),))
    assert packed.outs == (Shard(1),) * 3


def test_heads_that_do_not_divide_are_refused() -> None:
    op = aten.reshape.default
    heads = call(op, (2, 12), outs=((2, 3, 4),), shape=[2, 3, 4])
    assert table.choose(heads, (Shard(1),)).refusal == "heads"


def test_a_row_parallel_bias_is_added_after_the_sum() -> None:
    op = aten.linear.default
    linear = call(op, (2, 8), (4, 8), (4,), outs=((2, 4),))
    ins = (Shard(1), Shard(1), REPLICATE)
    assert table.choose(linear, ins).instead == "add_bias_last"


def test_a_number_is_never_added_to_a_partial_sum() -> None:
    op = aten.add.Tensor
    add = call(op, (4,), outs=((4,),), other=1.0)
    assert table.choose(add, (PARTIAL,)).wants == (REPLICATE,)


def test_a_weight_is_never_gathered_in_favour_of_an_activation() -> None:
    op = aten.linear.default
    linear = call(op, (2, 8), (4, 8), outs=((2, 4),))
    assert table.choose(linear, (Shard(0), Shard(0))).wants == (REPLICATE, Shard(0))


def test_an_operator_without_a_rule_is_gathered_and_unproven() -> None:
    choice = table.choose(Call("unknown", {}, ((4,),), ((4,),), 2), (Shard(0),))
    assert (choice.wants, choice.outs, choice.proven) == ((REPLICATE,), (REPLICATE,), False)


def _softmax_of_parts(call_: Call, ins: tuple):
    labels = tuple(range(len(call_.shapes[0])))
    return solve(Factors((labels,), (labels,)), call_, ins)


def _leave_as_it_is(call_: Call, ins: tuple):
    return Choice(ins, ins)


MUTANTS = {
    "softmax": (aten.softmax.int, _softmax_of_parts),  # splits what must be whole
    "relu": (aten.relu.default, _leave_as_it_is),  # lets a sum through what is not linear
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_rule_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.RULES, *MUTANTS[name])
    with pytest.raises(AssertionError):
        check_rule(*CASES[name]())
