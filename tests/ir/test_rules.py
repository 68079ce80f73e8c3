"""Every placement rule against the real operator, in float64, for all placements of its inputs."""

from __future__ import annotations

import random

import pytest
import torch

from autoshard.ir.placement import PARTIAL, REPLICATE, Shard
from autoshard.ir.rules import communication, table
from autoshard.ir.rules.call import Call, Choice, TensorRef
from autoshard.ir.rules.factors import Factors, solve
from autoshard.ops import collectives
from tests.ir import rule_cases as forward
from tests.ir import rule_cases_backward as backward
from tests.ir import rule_cases_transforms as transforms
from tests.ir.rule_cases import Case, f
from tests.ir.rule_harness import check_rule
from tests.ir.rule_sizes import LOCAL, shape_of_output

aten = torch.ops.aten


CASES: dict[str, Case] = {}
for _family in (
    *(forward.POINTWISE, forward.PRODUCTS, forward.REDUCTIONS, forward.NORMS, forward.VIEWS),
    *(forward.LOOKUPS, backward.LOSSES, backward.CONVOLUTIONS, backward.BACKWARD),
    *(backward.FACTORIES, forward.ATTENTION, transforms.TRANSFORMS),
):
    CASES |= _family


def check(case: Case, name: str, size: int = 2) -> set:
    """Check one case; its shapes and values follow from its name."""
    random.seed(name)
    torch.manual_seed(len(name))
    op, *args = case()
    kwargs = args.pop() if isinstance(args[-1], dict) else {}
    is_defined = op not in backward.UNDEFINED
    return check_rule(op, *args, size=size, local=LOCAL.get(op), is_defined=is_defined, **kwargs)


@pytest.mark.parametrize("name", CASES)
def test_the_parts_of_an_operator_make_its_whole(name: str) -> None:
    check(CASES[name], name)


@pytest.mark.parametrize("name", ["aten.mul.Tensor", "linear", "softmax", "layer norm", "permute"])
def test_four_ranks_are_like_two(name: str) -> None:
    check(CASES[name], name, size=4)


def test_a_mask_is_broadcast_over_split_heads() -> None:
    outs = check_rule(*forward.attention(mask=(2, 1, 2, 2)))
    assert (Shard(1),) in outs


def test_shared_key_heads_are_split_with_their_query_heads() -> None:
    op = aten.scaled_dot_product_attention.default
    outs = check_rule(op, f(2, 8, 2, 4), f(2, 4, 2, 4), f(2, 4, 2, 4), enable_gqa=True)
    assert (Shard(1),) in outs


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
    check_rule(aten.reshape.default, f(*before), list(after), local=shape_of_output("shape"))


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
    "aten.relu.default": (
        aten.relu.default,
        _leave_as_it_is,
    ),  # lets a sum through what is not linear
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_rule_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.RULES, *MUTANTS[name])
    with pytest.raises(AssertionError):
        check_rule(*CASES[name]())


def test_every_rule_has_a_property_test() -> None:
    """Those that speak or draw have theirs in test_rules_of_our_operators."""
    tested = {case()[0] for case in CASES.values()}
    names = {str(op) for op in tested}
    ours = torch.ops.autoshard
    others = {*communication.TABLE, collectives.release, ours.bias_dropout_add_layer_norm.default}
    others |= {ours.bias_dropout_add_layer_norm_backward.default}
    missing = [op for op in table.RULES if op not in tested | others and str(op) not in names]
    assert missing == [], "give each a case in tests/ir/rule_cases.py"


@pytest.mark.parametrize(("reduction", "wanted"), [(1, REPLICATE), (2, PARTIAL)])
def test_only_the_backward_of_a_mean_needs_its_whole_total_weight(reduction, wanted) -> None:
    shapes = ((), (4, 8), (4,), ())  # the loss's gradient, log probabilities, labels, total weight
    backward = call(
        aten.nll_loss_backward.default,
        *shapes,
        outs=((4, 8),),
        reduction=reduction,
        weight=None,
        total_weight=TensorRef(3),
    )
    choice = table.choose(backward, (REPLICATE, Shard(0), Shard(0), PARTIAL))
    assert choice.wants == (REPLICATE, Shard(0), Shard(0), wanted)
    assert choice.outs == (Shard(0),)
