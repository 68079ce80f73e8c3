"""Our own operators: collectives change the placement along their axis, and only there.

Along any other axis a collective is the identity on values. The vocabulary operators are the
replacements that ``embedding`` and ``cross_entropy_loss`` ask for.
"""

from __future__ import annotations

from collections.abc import Callable

from autoshard.ir.placement import PARTIAL, REPLICATE, Placement, Shard, normalize
from autoshard.ir.rules.call import Call, Choice, Rule
from autoshard.ir.rules.factors import Factors, solve
from autoshard.mesh import is_data_parallel
from autoshard.ops import collectives, dropout, vocab, vocab_logits

Ends = Callable[[Call], Placement]
ONLY_X = frozenset({0})


def _replicated(call: Call) -> Placement:
    return REPLICATE


def _partial(call: Call) -> Placement:
    return PARTIAL


def _shard(call: Call) -> Placement:
    extent = max(call.shapes[0][call["dim"]], call.outs[0][call["dim"]])
    return normalize(Shard(call["dim"], tuple(call["blocks"])), extent)


def collective(before: Ends, after: Ends) -> Rule:
    """Return the rule of an operator that turns one placement into another along its axis."""

    def rule(call: Call, ins: tuple[Placement, ...]) -> Choice:
        if call.is_along:
            return Choice((before(call),), (after(call),))
        labels = tuple(range(len(call.shapes[0])))
        # Over dp shapes are those of one rank's samples: each rank cuts and joins its own.
        free = "dim" not in call.arguments or (
            is_data_parallel(call.axis) and not is_data_parallel(call["axis"])
        )
        whole = frozenset() if free else frozenset({call["dim"]})
        return solve(Factors((labels,), (labels,), whole=whole, linear=(ONLY_X,)), call, ins)

    return rule


def _wait(call: Call, ins: tuple[Placement, ...]) -> Choice:
    return Choice(ins, ins)


def _dropout(call: Call, ins: tuple[Placement, ...]) -> Choice:
    """The mask follows the global element, so each rank draws its own part of one mask."""
    labels = tuple(range(len(call.shapes[0])))
    factors = Factors((labels, ("rng",)), (labels,), whole=frozenset({"rng"}), linear=(ONLY_X,))
    return solve(factors, call, ins)


def _one_block(placement: Placement, dim: int) -> Placement:
    """Return the contiguous shard along ``dim``; padding (one longer block) is kept."""
    is_fine = isinstance(placement, Shard) and placement.dim == dim and len(placement.blocks) <= 1
    return placement if is_fine else Shard(dim)


def _vocab_embedding(call: Call, ins: tuple[Placement, ...]) -> Choice:
    if call.is_along:
        return Choice((_one_block(ins[0], 0), REPLICATE), (PARTIAL,))
    rows = tuple(range(len(call.shapes[1])))
    labels = (("v", "d"), rows)
    return solve(Factors(labels, ((*rows, "d"),), whole=frozenset("v")), call, ins)


def _vocab_embedding_backward(call: Call, ins: tuple[Placement, ...]) -> Choice:
    if call.is_along:
        return Choice((REPLICATE, REPLICATE), (Shard(0),))
    rows = tuple(range(len(call.shapes[1])))
    factors = Factors(((*rows, "d"), rows), (("v", "d"),), sums=frozenset(rows))
    return solve(factors, call, ins)


def _vocab_cross_entropy(call: Call, ins: tuple[Placement, ...]) -> Choice:
    rows = tuple(range(len(call.shapes[1])))
    if call.is_along:
        return Choice((_one_block(ins[0], len(rows)), REPLICATE), (REPLICATE, REPLICATE))
    labels = ((*rows, "v"), rows)
    return solve(Factors(labels, (rows, rows), whole=frozenset("v")), call, ins)


def _vocab_cross_entropy_backward(call: Call, ins: tuple[Placement, ...]) -> Choice:
    rows = tuple(range(len(call.shapes[2])))
    if call.is_along:
        logits = _one_block(ins[1], len(rows))
        return Choice((REPLICATE, logits, REPLICATE, REPLICATE), (logits,))
    labels = (rows, (*rows, "v"), rows, rows)
    return solve(Factors(labels, ((*rows, "v"),), whole=frozenset("v")), call, ins)


def _vocab_logsumexp(call: Call, ins: tuple[Placement, ...]) -> Choice:
    rows = tuple(range(len(call.shapes[0]) - 1))
    if call.is_along:
        return Choice((_one_block(ins[0], len(rows)),), (REPLICATE,))
    return solve(Factors(((*rows, "v"),), (rows,), whole=frozenset("v")), call, ins)


def _vocab_logsumexp_backward(call: Call, ins: tuple[Placement, ...]) -> Choice:
    rows = tuple(range(len(call.shapes[0])))
    if call.is_along:
        logits = _one_block(ins[1], len(rows))
        return Choice((REPLICATE, logits, REPLICATE), (logits,))
    labels = (rows, (*rows, "v"), rows)
    factors = Factors(labels, ((*rows, "v"),), whole=frozenset("v"), linear=(ONLY_X,))
    return solve(factors, call, ins)


def _vocab_gather(call: Call, ins: tuple[Placement, ...]) -> Choice:
    rows = tuple(range(len(call.shapes[0]) - 1))
    if call.is_along:
        return Choice((_one_block(ins[0], len(rows)), REPLICATE), (PARTIAL,))
    labels, out = ((*rows, "v"), (*rows, "k")), (*rows, "k")
    factors = Factors(labels, (out,), whole=frozenset("vk"), linear=(ONLY_X,))
    return solve(factors, call, ins)


def _vocab_gather_backward(call: Call, ins: tuple[Placement, ...]) -> Choice:
    rows = tuple(range(len(call.shapes[0]) - 1))
    if call.is_along:
        return Choice((REPLICATE, REPLICATE), (Shard(len(rows)),))
    labels = ((*rows, "k"), (*rows, "k"))
    factors = Factors(labels, ((*rows, "v"),), whole=frozenset("vk"), linear=(ONLY_X,))
    return solve(factors, call, ins)


TABLE: dict[object, Rule] = {
    collectives.copy_to: collective(_replicated, _replicated),
    collectives.all_reduce: collective(_partial, _replicated),
    collectives.all_gather: collective(_shard, _replicated),
    collectives.reduce_scatter: collective(_partial, _shard),
    collectives.shard: collective(_replicated, _shard),
    collectives.all_reduce_start: collective(_partial, _replicated),
    collectives.all_gather_start: collective(_shard, _replicated),
    collectives.reduce_scatter_start: collective(_partial, _shard),
    collectives.tied_all_reduce: collective(_partial, _replicated),
    collectives.from_copies: collective(_shard, _replicated),
    collectives.to_copies: collective(_replicated, _shard),
    collectives.copy_within: _wait,
    collectives.all_reduce_within: _wait,
    collectives.wait: _wait,
    dropout.dropout: _dropout,
    vocab.vocab_embedding: _vocab_embedding,
    vocab.vocab_embedding_backward: _vocab_embedding_backward,
    vocab.vocab_cross_entropy: _vocab_cross_entropy,
    vocab.vocab_cross_entropy_backward: _vocab_cross_entropy_backward,
    vocab_logits.vocab_logsumexp: _vocab_logsumexp,
    vocab_logits.vocab_logsumexp_backward: _vocab_logsumexp_backward,
    vocab_logits.vocab_gather: _vocab_gather,
    vocab_logits.vocab_gather_backward: _vocab_gather_backward,
}
