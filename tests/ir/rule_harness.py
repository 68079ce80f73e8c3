"""Try one placement rule against the real operator: the ranks' results make the whole result."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator

import torch

from autoshard.ir.placement import (
    PARTIAL,
    REPLICATE,
    Partial,
    Placement,
    Shard,
    blocks_of,
    join_shards,
    normalize,
    take_shard,
)
from autoshard.ir.rules.call import Call, Choice, TensorRef
from autoshard.ir.rules.table import choose

Local = Callable[[dict, Choice, int], dict]


def tensors_of(value: object) -> tuple[torch.Tensor, ...]:
    """Return the tensors of an operator's result."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(v for v in values if isinstance(v, torch.Tensor))


def bind(op: object, args: tuple, kwargs: dict) -> tuple[dict[str, object], list[torch.Tensor]]:
    """Return arguments by name, tensors as references, and the tensors in that order."""
    found: list[torch.Tensor] = []

    def reference(value: object) -> object:
        if isinstance(value, torch.Tensor):
            found.append(value)
            return TensorRef(len(found) - 1)
        if isinstance(value, (tuple, list)):
            return [reference(v) for v in value]
        return value

    bound = {}
    for place, argument in enumerate(op._schema.arguments):
        if place < len(args):
            bound[argument.name] = reference(args[place])
        else:
            bound[argument.name] = reference(kwargs.get(argument.name, argument.default_value))
    return bound, found


def run(op: object, bound: dict[str, object], values: list[torch.Tensor]) -> object:
    """Call the operator with other tensors in the places of its references."""

    def value(item: object) -> object:
        if isinstance(item, TensorRef):
            return values[item.index]
        return [value(v) for v in item] if isinstance(item, list) else item

    arguments = op._schema.arguments
    args = [value(bound[a.name]) for a in arguments if not a.kwarg_only]
    return op(*args, **{a.name: value(bound[a.name]) for a in arguments if a.kwarg_only})


def placements(value: torch.Tensor, size: int) -> Iterator[Placement]:
    """Yield the ways in which a value may lie: whole, split along each dim, in blocks, partial."""
    yield REPLICATE
    if value.is_floating_point() or value.is_complex():
        yield PARTIAL
    for dim, extent in enumerate(value.shape):
        if extent % size == 0 and extent:
            yield Shard(dim)
        if extent % (2 * size) == 0 and extent:
            yield Shard(dim, (extent // 2,) * 2)


def parts_of(value: torch.Tensor, placement: Placement, size: int) -> list[torch.Tensor]:
    """Return what each rank holds of a value."""
    if isinstance(placement, Shard):
        return [take_shard(value, placement, i, size).clone() for i in range(size)]
    if isinstance(placement, Partial):
        terms = [torch.randn_like(value) for _ in range(size - 1)]
        odd = ~value.isfinite()  # such a sum has such terms, on all ranks
        return [*(term.where(~odd, value) for term in terms), value - sum(terms)]
    return [value] * size


def whole_of(parts: list[torch.Tensor], placement: Placement, extent: int) -> torch.Tensor:
    """Return the value of which the ranks hold ``parts``; replicas must be equal."""
    if isinstance(placement, Shard):
        blocks = blocks_of(placement, extent)
        return join_shards(parts, normalize(Shard(placement.dim, blocks), extent))
    if isinstance(placement, Partial):
        return sum(parts)
    for part in parts[1:]:
        assert torch.allclose(part, parts[0], 0, 0, equal_nan=True), "replicas differ"
    return parts[0]


LIMIT = 64  # combinations of input placements that one case tries


def combinations(values: list[torch.Tensor], size: int) -> Iterator[tuple[Placement, ...]]:
    """Yield placements of all inputs: every combination, or, of very many, a fair choice.

    The choice holds each input's placements beside whole others, all inputs split along one dim (as
    far as they have it), and random ones.
    """
    ways = [tuple(placements(v, size)) for v in values]
    if math.prod(map(len, ways)) <= LIMIT:
        yield from itertools.product(*ways)
        return
    draw = random.Random(0)
    for place, own in enumerate(ways):
        yield from (tuple(p if i == place else REPLICATE for i in range(len(ways))) for p in own)
    common = dict.fromkeys(p for own in ways for p in own)
    for wanted in common:
        yield tuple(wanted if wanted in own else REPLICATE for own in ways)
    for _ in range(LIMIT):
        yield tuple(draw.choice(own) for own in ways)


def check_rule(
    op: object,
    *args: object,
    size: int = 2,
    local: Local | None = None,
    is_defined: bool = True,
    **kwargs: object,
) -> set:
    """Check a rule for combinations of input placements; return the outputs it gave.

    ``local(bound, choice, size)`` returns the arguments of one rank where some are sizes. Zeros
    among the inputs count as made by zeros. ``is_defined`` is False for values nobody defined.
    """
    bound, values = bind(op, args, kwargs)
    expected = tensors_of(op(*args, **kwargs))
    call = Call(
        op, bound, tuple(tuple(v.shape) for v in values), tuple(tuple(e.shape) for e in expected),
        size, zeros=frozenset(i for i, v in enumerate(values) if v.dim() and not v.any()),
    )  # fmt: skip
    seen = set()
    for ins in combinations(values, size):
        choice = choose(call, ins)
        assert choice.proven, f"{op} has no rule"
        assert len(choice.wants) == len(values) and len(choice.outs) == len(expected)
        if choice.instead:
            continue
        settled = choose(call, choice.wants)
        assert settled.wants == choice.wants, f"{op} {ins}: not settled: {settled}"
        assert settled.outs == choice.outs, f"{op} {ins}: outputs change: {settled}"
        if choice in seen:
            continue
        seen.add(choice)
        _check_choice(op, bound, values, expected, choice, size, local, is_defined)
    return {choice.outs for choice in seen}


def _check_choice(
    op: object,
    bound: dict,
    values: list,
    expected: tuple,
    choice: Choice,
    size: int,
    local: Local | None,
    is_defined: bool,
) -> None:
    for dim in choice.uniform if is_defined else ():
        _check_uniform(expected[0], dim, size)
    held = [parts_of(v, p, size) for v, p in zip(values, choice.wants, strict=True)]
    given = local(bound, choice, size) if local else bound
    results = [tensors_of(run(op, given, [h[i] for h in held])) for i in range(size)]
    for place, (want, placement) in enumerate(zip(expected, choice.outs, strict=True)):
        parts = [r[place] for r in results]
        extent = want.shape[placement.dim] if isinstance(placement, Shard) else 0
        parts = parts if is_defined else [torch.zeros_like(p) for p in parts]
        got = whole_of(parts, placement, extent)
        assert got.shape == want.shape, f"{op} {choice}: {tuple(got.shape)}"
        if not is_defined:
            continue
        if want.is_floating_point() or want.is_complex():
            error = {"rtol": 1e-10, "atol": 1e-10, "equal_nan": True, "check_dtype": False}
            torch.testing.assert_close(got, want, **error, msg=f"{op} {choice}")
        else:
            assert torch.equal(got, want), f"{op} {choice}"


def _check_uniform(value: torch.Tensor, dim: int, size: int) -> None:
    """Check that equal parts along a dim that is called uniform are equal."""
    if value.shape[dim] % size == 0:
        first, *rest = value.chunk(size, dim)
        assert all(torch.equal(first, part) for part in rest), f"dim {dim} is not uniform"
