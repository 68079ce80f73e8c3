"""Means over the batch as sums and factors: what globalize-loss puts in their place."""

from __future__ import annotations

from math import prod

import torch
from torch.fx import Node

from autoshard.compiler.pass_base import PassContext
from autoshard.diagnostics import PassError
from autoshard.ir.node_info import info, val
from autoshard.ir.placement import PARTIAL, REPLICATE, Partial, Placement, Shard
from autoshard.ir.rewrite import Rewriter
from autoshard.ir.rules import losses
from autoshard.ir.rules.call import bound_arguments, shapes_of, tensor_inputs
from autoshard.passes._batch_counts import Counts

aten = torch.ops.aten
MEANS = (aten.mean.default, aten.mean.dim)
CLASSES = (
    aten.cross_entropy_loss.default,
    aten.nll_loss.default,
    aten.nll_loss_nd.default,
)
ADDITIVE = (aten.add.Tensor, aten.sub.Tensor)
AMBIGUOUS = 4  # a divisor up to this may be a constant of the loss as well as a count
Ins = tuple[Placement, ...]


def as_sum(
    rewriter: Rewriter, counts: Counts, node: Node, ins: Ins, terms: int
) -> list[Node] | None:
    """Replace a mean over the batch by a sum times one over the global count."""
    if not any(isinstance(p, Shard) for p in ins):
        return None
    if node.target in MEANS:
        return _mean(rewriter, node, ins, terms)
    if node.target in losses.TABLE and bound_arguments(node)["reduction"] == losses.MEAN:
        return _loss(rewriter, counts, node, terms)
    return None


def _mean(rewriter: Rewriter, node: Node, ins: Ins, terms: int) -> list[Node] | None:
    (x, *rest), rank = node.args, len(shapes_of(tensor_inputs(node)[0])[0])
    dims = [d % rank for d in rest[0]] if rest and rest[0] else list(range(rank))
    if ins[0].dim not in dims:
        return None
    op = aten.sum.dim_IntList if rest else aten.sum.default
    count = prod(val(x).shape) // prod(val(node).shape)
    with rewriter.before(node):
        total = rewriter.call(op, x, *rest, like=node, **node.kwargs)
        result = rewriter.call(aten.mul.Tensor, total, 1.0 / (count * terms), like=node)
    rewriter.replace(node, result)
    return [total, result]


def _loss(rewriter: Rewriter, counts: Counts, node: Node, terms: int) -> list[Node]:
    x, target = node.args[:2]
    with rewriter.before(node):
        total = rewriter.call(node.target, *_with(node, "reduction", losses.SUM), like=node)
        if node.target in CLASSES and not val(target).is_floating_point():
            factor = counts.valid(node, target)
        else:
            rows = prod(val(x).shape) // (val(x).shape[1] if node.target in CLASSES else 1)
            factor = 1.0 / (rows * terms)
        result = rewriter.call(aten.mul.Tensor, total, factor, like=node)
    rewriter.replace(node, result)
    return [total, result]


def _with(node: Node, name: str, value: object) -> list[object]:
    """Return a call's arguments, all positional, with one changed."""
    return list({**bound_arguments(node), name: value}.values())


def count_from_number(
    rewriter: Rewriter, ctx: PassContext, node: Node, ins: Ins, samples: int, terms: int
) -> list[Node] | None:
    """Read ``sum / number`` as a mean where the number counts this micro-batch.

    Python has folded ``x.numel()`` or ``x.shape[0]`` into a number that is too small by the number
    of terms. A small number may as well be a constant of the loss: that is refused.
    """
    if ins != (PARTIAL,) or terms == 1 or node.target not in (aten.div.Tensor, aten.mul.Tensor):
        return None
    total, number = node.args
    if isinstance(total, (int, float)):
        total, number = number, total
    divisor = _divisor(node.target is aten.div.Tensor, number)
    if divisor not in _counts_behind(total, samples):
        return None
    if divisor <= AMBIGUOUS:
        raise PassError(
            f"the loss divides a sum over the batch by {divisor} ({info(node).source}): that may be"
            f" the size of this micro-batch, or a constant",
            help=f"write .mean(), or use a micro-batch of more than {AMBIGUOUS} samples",
        )
    ctx.note(node, f"{divisor} is read as this micro-batch's count: the loss is a mean over all")
    with rewriter.before(node):
        result = rewriter.call(aten.mul.Tensor, total, 1.0 / (divisor * terms), like=node)
    rewriter.replace(node, result)
    return [result]


def _divisor(is_quotient: bool, number: float) -> int:
    """Return by which whole number a sum is divided; 0 for none."""
    if not is_quotient and number:
        number = 1.0 / number
    whole = round(number)
    return whole if whole > 1 and abs(number - whole) <= 1e-9 * whole else 0


def _counts_behind(total: Node, samples: int) -> set[int]:
    """Return the numbers that a count of what was summed can be: samples, rows, elements."""
    while not _is_sum(total):
        inner = tensor_inputs(total)
        if not inner:
            return set()
        total = inner[0]
    extents = shapes_of(tensor_inputs(total)[0])[0]
    return {samples, *(prod(extents[:n]) for n in range(1, len(extents) + 1))} - {0, 1}


def _is_sum(node: Node) -> bool:
    sums = (aten.sum.default, aten.sum.dim_IntList)
    is_loss = node.target in losses.TABLE and bound_arguments(node)["reduction"] == losses.SUM
    return node.target in sums or is_loss


def scale_replicated(
    rewriter: Rewriter, node: Node, ins: Ins, terms: int, *, alone: bool = False
) -> list[Node] | None:
    """Divide a summand that doesn't depend on the batch among the terms: ``P + R`` --> ``P + P``.

    ``alone`` means that ``node`` itself is the summand and that its readers are left alone.
    """
    if alone:
        return [_term(rewriter, node, terms)]
    partial = [isinstance(p, Partial) for p in ins]
    if node.target not in ADDITIVE or terms == 1 or not any(partial):
        return None
    if len(ins) == 1:
        return _scale_number(rewriter, node, terms)
    if all(partial) or REPLICATE not in ins:
        return None
    place = partial.index(False)
    with rewriter.before(node):
        term = _term(rewriter, node.args[place], terms)
        args = [term if i == place else a for i, a in enumerate(node.args)]
        made = rewriter.call(node.target, *args, like=node, **node.kwargs)
    rewriter.replace(node, made)
    return [term, made]


def _scale_number(rewriter: Rewriter, node: Node, terms: int) -> list[Node] | None:
    total, number = node.args
    if number == 0:
        return None
    args, placements = (total, number / terms), {**info(node).placements, "dp": PARTIAL}
    with rewriter.before(node):
        made = rewriter.call(node.target, *args, like=node, placements=placements, **node.kwargs)
    rewriter.replace(node, made)
    return [made]


def _term(rewriter: Rewriter, value: Node, terms: int) -> Node:
    placements = {**info(value).placements, "dp": PARTIAL}
    return rewriter.call(aten.mul.Tensor, value, 1.0 / terms, like=value, placements=placements)
