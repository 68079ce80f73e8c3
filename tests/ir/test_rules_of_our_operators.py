"""The rules of our own operators, run by virtual ranks that speak to each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from autoshard.ir.placement import PARTIAL, REPLICATE, Placement, Shard
from autoshard.ir.rules import communication, table
from autoshard.ir.rules.call import Call, Choice
from autoshard.ops import bias_dropout_add_layer_norm as fused
from autoshard.ops import collectives, vocab, vocab_logits
from autoshard.ops.dropout import DropoutArgs, dropout
from autoshard.ops.library import spec
from autoshard.ops.one_rank import OneRank
from tests.ir.rule_cases import f, ints
from tests.ir.rule_harness import bind, check_rule, combinations, parts_of, tensors_of, whole_of
from tests.passes import ranks

BLOCKS = [4, 4]
SHAPE = (4, 8)
CLASSES = 8
RNG = torch.tensor([7, 3, 0])
COLLECTIVES = {
    "copy_to": (collectives.copy_to, ()),
    "all_reduce": (collectives.all_reduce, ()),
    "all_gather": (collectives.all_gather, (1, BLOCKS)),
    "all_gather of one block": (collectives.all_gather, (0, [])),
    "reduce_scatter": (collectives.reduce_scatter, (1, BLOCKS)),
    "shard": (collectives.shard, (1, BLOCKS)),
    "all_reduce_start": (collectives.all_reduce_start, ()),
    "all_gather_start": (collectives.all_gather_start, (1, [])),
    "reduce_scatter_start": (collectives.reduce_scatter_start, (0, [])),
}


def entropy(logits: torch.Tensor, target: torch.Tensor, *rest: object) -> tuple:
    """Return what the operator over a split vocabulary must give."""
    loss = F.cross_entropy(logits, target, reduction="none", label_smoothing=0.1)
    return loss, logits.logsumexp(-1)


def entropy_backward(grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, *rest: object):
    logits = logits.clone().requires_grad_()
    entropy(logits, target)[0].backward(grad)
    return logits.grad


def embedding_backward(grad: torch.Tensor, ids: torch.Tensor, *rest: object) -> torch.Tensor:
    weight = torch.zeros(CLASSES, grad.shape[-1], dtype=grad.dtype, requires_grad=True)
    F.embedding(ids, weight).backward(grad)
    return weight.grad


def entropy_case(axis: str, size: int) -> tuple:
    settings = (axis, size, CLASSES, -100, 0.1)
    return vocab.vocab_cross_entropy, (f(4, CLASSES), ints(CLASSES, 4), *settings), entropy


def entropy_backward_case(axis: str, size: int) -> tuple:
    logits, target = f(4, CLASSES), ints(CLASSES, 4)
    given = (f(4), logits, target, logits.logsumexp(-1), axis, size, CLASSES, -100, 0.1)
    return vocab.vocab_cross_entropy_backward, given, entropy_backward


def embedding_case(axis: str, size: int) -> tuple:
    given = (f(CLASSES, 4), ints(CLASSES, 4, 2), axis, size)
    return vocab.vocab_embedding, given, lambda w, ids, *rest: F.embedding(ids, w)


def embedding_backward_case(axis: str, size: int) -> tuple:
    given = (f(4, 2, 4), ints(CLASSES, 4, 2), CLASSES // size, axis, size)
    return vocab.vocab_embedding_backward, given, embedding_backward


def logsumexp_case(axis: str, size: int) -> tuple:
    given = (f(4, CLASSES), axis, size, CLASSES)
    return vocab_logits.vocab_logsumexp, given, lambda x, *rest: x.logsumexp(-1)


def logsumexp_backward_case(axis: str, size: int) -> tuple:
    logits = f(4, CLASSES)
    given = (f(4), logits, logits.logsumexp(-1), axis, size, CLASSES)

    def reference(grad: torch.Tensor, x: torch.Tensor, *rest: object) -> torch.Tensor:
        return grad.unsqueeze(-1) * x.softmax(-1)

    return vocab_logits.vocab_logsumexp_backward, given, reference


def gather_case(axis: str, size: int) -> tuple:
    given = (f(4, CLASSES), ints(CLASSES, 4, 2), axis, size)
    return vocab_logits.vocab_gather, given, lambda x, index, *rest: x.gather(-1, index)


def gather_backward_case(axis: str, size: int) -> tuple:
    given = (f(4, 2), ints(CLASSES, 4, 2), CLASSES // size, axis, size)

    def reference(grad: torch.Tensor, index: torch.Tensor, *rest: object) -> torch.Tensor:
        return grad.new_zeros(4, CLASSES).scatter_add(-1, index, grad)

    return vocab_logits.vocab_gather_backward, given, reference


VOCABULARY = (
    *(entropy_case, entropy_backward_case, embedding_case, embedding_backward_case),
    *(logsumexp_case, logsumexp_backward_case, gather_case, gather_backward_case),
)


def call_of(op: object, args: tuple, expected: tuple, size: int, axis: str) -> tuple[Call, list]:
    bound, values = bind(op, args, {})
    shapes = tuple(tuple(v.shape) for v in values)
    outs = tuple(tuple(e.shape) for e in expected)
    return Call(op, bound, shapes, outs, size, axis), values


def check_on_ranks(op: object, args: tuple, reference, size: int = 2) -> set:
    """Check a rule along the operator's own axis, where the ranks speak to each other."""
    expected = tensors_of(reference(*args))
    call, values = call_of(op, args, expected, size, "tp")
    seen = set()
    for ins in combinations(values, size):
        choice = table.choose(call, ins)
        if choice in seen:
            continue
        seen.add(choice)
        held = [parts_of(v, p, size) for v, p in zip(values, choice.wants, strict=True)]
        parts = ranks.on_ranks(size, lambda comm, held=held: run_local(op, args, held, comm))
        for place, (want, placement) in enumerate(zip(expected, choice.outs, strict=True)):
            extent = want.shape[placement.dim] if isinstance(placement, Shard) else 0
            got = whole_of([p[place] for p in parts], placement, extent)
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    return {choice.outs for choice in seen}


def run_local(op: object, args: tuple, held: list, comm: object) -> tuple:
    """Run an operator on one rank's part of its tensors, waiting for what it starts."""
    own = iter([parts[comm.index("tp")] for parts in held])
    given = [next(own) if isinstance(a, torch.Tensor) else a for a in args]
    result = spec(op).run(comm, *given)
    is_started = "_start" in str(op)
    return tensors_of(spec(collectives.wait).run(comm, result) if is_started else result)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_keeps_the_value_and_changes_how_it_lies(name: str) -> None:
    op, cut = COLLECTIVES[name]
    x, sized = f(*SHAPE), (2,) if cut else ()
    (outs,) = check_on_ranks(op, (x, *cut, "tp", *sized), lambda x, *rest: x)
    before = {REPLICATE, PARTIAL, Shard(0), Shard(1, tuple(BLOCKS)), Shard(1)}
    assert outs[0] in before


@pytest.mark.parametrize("case", VOCABULARY, ids=lambda case: case.__name__)
def test_split_vocabularies_equal_whole_ones(case) -> None:
    op, args, reference = case("tp", 2)
    check_on_ranks(op, args, reference)


@pytest.fixture
def _alone():
    """Let operators run eagerly as they do where their own axis has one rank."""
    ranks._register()
    ranks._here.comm = OneRank()


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_along_another_axis_a_collective_is_the_identity(name: str) -> None:
    op, cut = COLLECTIVES[name]
    if "_start" in name:
        op = getattr(collectives, name.removesuffix("_start"))
        assert table.RULES[op] is not None
    check_rule(op, f(*SHAPE), *cut, "other", *((1,) if cut else ()))


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("case", VOCABULARY, ids=lambda case: case.__name__)
def test_along_another_axis_rows_may_be_split(case) -> None:
    op, args, _ = case("other", 1)
    check_rule(op, *args)


@pytest.mark.parametrize("size", [2, 4])
def test_dropout_draws_the_parts_of_one_mask(size: int) -> None:
    args = DropoutArgs(f(4, 16), RNG, 0.5, 2)
    whole = spec(dropout).run(OneRank(), *args)
    call, values = call_of(dropout, tuple(args), (whole,), size, "tp")
    for ins in combinations(values, size):
        choice = table.choose(call, ins)
        placement = choice.outs[0]
        held = parts_of(args.x, choice.wants[0], size)

        def work(comm, held=held, placement: Placement = placement):
            own = args._replace(x=held[comm.index("tp")])
            if isinstance(placement, Shard):
                own = own.sharded(placement.dim, placement.blocks, "tp", size)
            return spec(dropout).run(comm, *own)

        extent = whole.shape[placement.dim] if isinstance(placement, Shard) else 0
        got = whole_of(ranks.on_ranks(size, work), placement, extent)
        torch.testing.assert_close(got, whole, rtol=1e-10, atol=1e-10)


PLACE = (RNG, 0.5, 2, -1, 1, [], [], [], [], [])


def fused_norm_case() -> tuple:
    return fused.bias_dropout_add_layer_norm, (
        *(f(2, 4, 8), f(8), f(2, 4, 8), f(8), f(8), 1e-5),
        *PLACE,
    )


def fused_norm_backward_case() -> tuple:
    op, given = fused_norm_case()
    _, s, mean, rstd = spec(op).run(OneRank(), *given)
    backward = torch.ops.autoshard.bias_dropout_add_layer_norm_backward.default
    return backward, (f(2, 4, 8), f(2, 4, 8), s, mean, rstd, given[3], True, True, *PLACE)


@pytest.mark.parametrize("case", [fused_norm_case, fused_norm_backward_case])
def test_a_norm_fused_with_dropout_draws_the_parts_of_one_mask(case) -> None:
    op, args = case()
    expected = tensors_of(spec(op).run(OneRank(), *args))
    call, values = call_of(op, args, expected, 2, "tp")
    for choice in dict.fromkeys(table.choose(call, ins) for ins in combinations(values, 2)):
        held = [parts_of(v, p, 2) for v, p in zip(values, choice.wants, strict=True)]
        parts = ranks.on_ranks(2, lambda comm, h=held, c=choice: run_fused(op, args, h, c, comm))
        for place, (want, placement) in enumerate(zip(expected, choice.outs, strict=True)):
            extent = want.shape[placement.dim] if isinstance(placement, Shard) else 0
            got = whole_of([p[place] for p in parts], placement, extent)
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def run_fused(op: object, args: tuple, held: list, choice: Choice, comm: object) -> tuple:
    """Run a fused norm on one rank's rows, told where they lie."""
    own = iter([parts[comm.index("tp")] for parts in held])
    given = tuple(next(own) if isinstance(a, torch.Tensor) else a for a in args)
    split = choice.outs[0]
    if isinstance(split, Shard):
        given = fused.sharded(given, split.dim, split.blocks, "tp", 2)
    return tensors_of(spec(op).run(comm, *given))


def test_neighbours_that_hold_one_head_sum_what_they_make_of_it() -> None:
    op, x = collectives.all_reduce_within, f(4, 8)
    call, _ = call_of(op, (x, 2, "tp"), (x,), 4, "tp")
    assert table.choose(call, (Shard(0),)).outs == (Shard(0),)
    held = [parts_of(x, Shard(0), 4)]
    got = ranks.on_ranks(4, lambda comm: run_local(op, (x, 2, "tp"), held, comm))
    pairs = x.unflatten(0, (2, 2)).sum(1).repeat_interleave(2, 0)
    torch.testing.assert_close(torch.cat([part for (part,) in got]), pairs)


def test_the_only_head_is_read_from_its_copies_and_one_copy_gets_its_gradient() -> None:
    alone = f(4, 3)
    wide, args = torch.cat((alone, alone), 1), (1, [], "tp", 2, 3)
    call, _ = call_of(collectives.from_copies, (wide, *args), (alone,), 2, "tp")
    assert table.choose(call, (Shard(1),)) == Choice((Shard(1),), (REPLICATE,))
    call, _ = call_of(collectives.to_copies, (alone, *args[:-1], 6), (wide,), 2, "tp")
    assert table.choose(call, (REPLICATE,)) == Choice((REPLICATE,), (Shard(1),))
    read = ranks.on_ranks(2, lambda comm: spec(collectives.from_copies).run(comm, alone, *args))
    assert all(torch.equal(part, alone) for part in read)
    given = ranks.on_ranks(2, lambda comm: spec(collectives.to_copies).run(comm, alone, *args))
    assert torch.equal(sum(given), alone)


def test_rows_before_the_copies_are_not_summed() -> None:
    x = f(3, 2)
    op = spec(collectives.all_reduce_within)
    made = ranks.on_ranks(2, lambda comm: op.run(comm, x, 2, "tp", 1))
    assert all(torch.equal(part, torch.cat((x[:1], 2 * x[1:]))) for part in made)


def test_ranks_that_share_a_parameter_sum_its_terms() -> None:
    (outs,) = check_on_ranks(
        collectives.tied_all_reduce, (f(*SHAPE), "tp", (0, 1)), lambda x, *rest: x
    )
    assert outs == (REPLICATE,)


def test_what_releases_a_buffer_has_no_value() -> None:
    call = Call(collectives.release, {}, ((4,),), (), 2)
    assert table.choose(call, (REPLICATE,)).outs == ()


TESTED = (
    *(op for op, _ in COLLECTIVES.values()),
    *(case("tp", 2)[0] for case in VOCABULARY),
    *(collectives.wait, dropout),
    *(collectives.copy_within, collectives.all_reduce_within, collectives.tied_all_reduce),
    *(collectives.from_copies, collectives.to_copies),
)


def test_every_rule_of_communication_is_tested_here() -> None:
    assert set(communication.TABLE) == set(TESTED)


def test_a_gather_that_forgets_its_blocks_would_be_seen() -> None:
    """Plant the fault: gather two blocks as if they were one."""
    op = collectives.all_gather
    with pytest.raises(AssertionError):
        wrong = (f(*SHAPE), 1, [], "tp", 2)
        held = [parts_of(wrong[0], Shard(1, tuple(BLOCKS)), 2)]
        got = ranks.on_ranks(2, lambda comm: run_local(op, wrong, held, comm))[0][0]
        torch.testing.assert_close(got, wrong[0])
