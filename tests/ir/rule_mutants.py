"""Break the rules of the placement table in one way each, and see which property tests notice.

    python -m tests.ir.rule_mutants [--part K/N]

A mutant wraps a rule and changes what it decides: a sum over ranks passes for a whole value, a
split one for another split, blocks are forgotten or halved, what must be whole is left split. It
must fail the test that compares the ranks' parts with the real operator. One that never fails, in
three draws of shapes and values, is printed as true: the test has a hole. Those that say the same
as the rule, or something else that holds, are named in ``EQUIVALENT`` with the reason, and not
counted.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from unittest import mock

from autoshard.diagnostics import AutoshardError
from autoshard.ir.placement import PARTIAL, REPLICATE, Partial, Placement, Shard, blocks_of
from autoshard.ir.rules import table
from autoshard.ir.rules.call import Call, Choice
from tests.ir.test_rules import CASES, check

DRAWS = 3
Mutation = Callable[[Call, tuple[Placement, ...], Choice], Choice]


def pass_sums_as_whole(call: Call, ins: tuple[Placement, ...], choice: Choice) -> Choice:
    """Call a sum over the ranks a value that each of them has."""
    return _with_outs(choice, lambda place, out: REPLICATE if isinstance(out, Partial) else out)


def pass_sums_as_split(call: Call, ins: tuple[Placement, ...], choice: Choice) -> Choice:
    """Call a sum over the ranks a value that is split along its first dim."""

    def split(place: int, out: Placement) -> Placement:
        return Shard(0) if isinstance(out, Partial) and call.outs[place] else out

    return _with_outs(choice, split)


def sum_what_is_whole(call: Call, ins: tuple[Placement, ...], choice: Choice) -> Choice:
    """Call what each rank has a term of a sum."""
    return _with_outs(choice, lambda place, out: PARTIAL if out == REPLICATE else out)


def drop_the_split(call: Call, ins: tuple[Placement, ...], choice: Choice) -> Choice:
    """Forget that an output is split."""
    return _with_outs(choice, lambda place, out: REPLICATE if isinstance(out, Shard) else out)


def split_another_dim(call: Call, ins: tuple[Placement, ...], choice: Choice) -> Choice:
    """Say that an output is split along another of its dims."""

    def turned(place: int, out: Placement) -> Placement:
        rank = len(call.outs[place])
        return replace(out, dim=(out.dim + 1) % rank) if isinstance(out, Shard) else out

    return _with_outs(choice, turned)


def forget_the_blocks(call: Call, ins: tuple[Placement, ...], choice: Choice) -> Choice:
    """Say that an output is split in one block, or in two where it is one."""

    def other(place: int, out: Placement) -> Placement:
        if not isinstance(out, Shard):
            return out
        if out.blocks:
            return Shard(out.dim)
        (extent,) = blocks_of(out, call.outs[place][out.dim])
        return Shard(out.dim, (extent // 2,) * 2) if extent % (2 * call.size) == 0 else out

    return _with_outs(choice, other)


def keep_sums(call: Call, ins: tuple[Placement, ...], choice: Choice) -> Choice:
    """Let a sum pass through what is not linear."""
    pairs = zip(ins, choice.wants, strict=True)
    if not any(isinstance(have, Partial) and want == REPLICATE for have, want in pairs):
        return choice
    return replace(choice, wants=ins, outs=(PARTIAL,) * len(call.outs))


def keep_splits(call: Call, ins: tuple[Placement, ...], choice: Choice) -> Choice:
    """Leave an input split where the operator needs all of it."""
    pairs = zip(ins, choice.wants, strict=True)
    given_up = [have for have, want in pairs if isinstance(have, Shard) and want == REPLICATE]
    dims = [(p.dim, shape) for p in given_up for shape in call.outs]
    fits = all(len(shape) > dim and shape[dim] % call.size == 0 for dim, shape in dims)
    if not given_up or not fits:
        return choice
    return replace(choice, wants=ins, outs=(Shard(given_up[0].dim),) * len(call.outs))


MUTATIONS: tuple[Mutation, ...] = (
    pass_sums_as_whole, pass_sums_as_split, sum_what_is_whole, drop_the_split,
    split_another_dim, forget_the_blocks, keep_sums, keep_splits,
)  # fmt: skip


EQUIVALENT: dict[str, tuple[str, str]] = {
    "the operator is linear: a sum may pass, which the rule is too careful to let it": (
        "keep_sums",
        "nll_loss_nd.default 0|nearest 1d|nearest 2d|linear 1d|bilinear|bicubic|lowered nearest 1d"
        "|lowered nearest 2d|lowered linear 1d|lowered bilinear|lowered bicubic"
        "|lowered adaptive pool|adaptive pool 1d|adaptive pool 2d|avg pool 1d|avg pool 2d"
        "|avg pool 2d of one sample|aten.to.dtype_layout|aten.to.device|aten._to_copy.default",
    ),
    "the result is zero, and so is the sum of the ranks' zeros": (
        "keep_sums|sum_what_is_whole",
        "zeros|new zeros|aten.zeros_like.default",
    ),
    "the values are undefined, so they are not compared": (
        "keep_sums|sum_what_is_whole|forget_the_blocks",
        "empty|new empty|aten.empty_like.default",
    ),
    "the result is one number everywhere: its parts may lie in any order": (
        "forget_the_blocks",
        "aten.zeros_like.default|aten.ones_like.default|aten.full_like.default|aten.fill.Scalar"
        "|aten.fill.Tensor",
    ),
    "a value is put all along the dim that is split: its parts are equal": (
        "forget_the_blocks",
        "put in pairs",
    ),
}


def is_equivalent(mutation: Mutation, name: str) -> bool:
    """Tell whether a mutant is known to say what holds."""
    return any(
        mutation.__name__ in mutations.split("|") and name in names.split("|")
        for mutations, names in EQUIVALENT.values()
    )


def _with_outs(choice: Choice, change: Callable[[int, Placement], Placement]) -> Choice:
    return replace(choice, outs=tuple(change(*pair) for pair in enumerate(choice.outs)))


def outcome(name: str, mutation: Mutation) -> str:
    """Return what became of a mutant of the rule that a case asks, "" where nothing changes."""
    op = CASES[name]()[0]
    key = op if op in table.RULES else str(op)
    rule, changed = table.RULES[key], []

    def wrong(call: Call, ins: tuple[Placement, ...]) -> Choice:
        right = rule(call, ins)
        made = right if right.instead else mutation(call, ins, right)
        changed.append(made != right)
        return made

    with mock.patch.dict(table.RULES, {key: wrong}):
        try:
            for draw in range(DRAWS):
                check(CASES[name], name + " " * draw)
        except (AssertionError, RuntimeError, IndexError, ValueError, AutoshardError):
            return "caught"
    return "true" if any(changed) else ""


def outcomes(names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield mutation, case and outcome of every mutant that changes something."""
    for name in names:
        for mutation in MUTATIONS:
            found = "" if is_equivalent(mutation, name) else outcome(name, mutation)
            if found:
                yield mutation.__name__, name, found


def main(argv: Sequence[str] | None = None) -> int:
    """Print how many mutants of each kind the property tests catch, and which ones survive."""
    parser = argparse.ArgumentParser(prog="python -m tests.ir.rule_mutants")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="each N-th case from the K-th")
    number, of = map(int, parser.parse_args(argv).part.split("/"))
    found = list(outcomes(list(CASES)[number - 1 :: of]))
    counts = Counter((mutation, result) for mutation, _, result in found)
    for mutation in MUTATIONS:
        caught, true = (counts[mutation.__name__, r] for r in ("caught", "true"))
        print(
            f"{mutation.__name__:<20} {caught + true:>5} mutants {caught:>5} caught {true:>5} true"
        )
    for mutation, name, result in found:
        if result == "true":
            print(f"true: {mutation} of {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
