"""Dimensions that are longer than the model's: attention heads that don't divide, padded by zeros.

A weight with padding makes outputs with padding. Operators that work on each head by itself carry
it on, side by side with the model's own heads, and the layer behind them sums it up: that adds
nothing when what is summed is zero there. So two facts are followed through a graph: by what a
value is longer, and whether all of the padding is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import torch
from torch.fx import Node

from autoshard.ir.node_info import val
from autoshard.ir.rules import pointwise, views
from autoshard.ir.rules.call import TensorRef, bound_arguments, tensor_inputs
from autoshard.ops import collectives
from autoshard.ops.dropout import dropout

aten = torch.ops.aten
ROLE = "padding"  # of nodes that give a value of each head zeros for padded ones
JOINS = (aten.cat.default, aten.stack.default)
PRODUCTS = pointwise.overloads(
    "mm.default mv.default dot.default bmm.default matmul.default einsum.default tensordot.default"
)
# Views that put other numbers beside their input's.
FILLING = pointwise.overloads(
    "pad.default constant_pad_nd.default slice_scatter.default select_scatter.default"
    " broadcast_tensors.default"
)
ADDS_FIRST = (aten.addmm.default, aten.baddbmm.default)
# Zeros come out where their first input is zero.
FIRST = frozenset(
    {
        *(op for op in views.TABLE if op not in (*JOINS, *FILLING)),
        *pointwise.overloads("sum.default sum.dim_IntList mean.default mean.dim cumsum.default"),
        *pointwise.overloads("_to_copy.default clone.default alias.default detach.default"),
        collectives.copy_to,
        collectives.wait,
        collectives.shard,
        collectives.all_gather,
        collectives.all_gather_start,
        dropout,
    }
)


@dataclass(frozen=True)
class Padding:
    """A value's split dimension is ``ratio`` times as long as the model's own.

    Every block of it is padded at its end. ``is_zero`` tells whether all of that is known as zero.
    """

    ratio: Fraction
    is_zero: bool

    def real(self, extent: int) -> int:
        """Return the model's own extent of a dimension that is ``extent`` long with padding."""
        found = extent / self.ratio
        return int(found) if found.denominator == 1 else extent


def makes_zeros(node: Node, given: tuple[Padding | None, ...], out: int = 0) -> bool:
    """Tell whether what a call computes of padding is zero in its output number ``out``.

    ``given`` is the padding of its tensor inputs. Where it can't be told the answer is no.
    """
    zeros = tuple(None if padding is None else padding.is_zero for padding in given)
    target, name = node.target, str(node.target)
    if target in FIRST or "backward" in name:
        return zeros[0] is True  # backwards are linear in the gradient, which comes first
    if target in JOINS:
        return all(zero is True for zero in zeros)
    if target is aten.linear.default:
        return True in zeros[:2] and zeros[2:] in ((), (True,))
    if target in ADDS_FIRST:
        return zeros[0] is True and True in zeros[1:]
    if target in PRODUCTS:
        return True in zeros
    if "scaled_dot_product" in name:
        return zeros[2] is True and out == 0  # a mean of values, whatever the weights
    return target in pointwise.TABLE and True in zeros and _computed(node, zeros)[0]


def has_slope(node: Node, given: tuple[Padding | None, ...]) -> bool:
    """Tell whether an elementwise operator has a finite slope where its inputs' padding is zero."""
    if node.target not in pointwise.TABLE:
        return True
    return _computed(node, tuple(p and p.is_zero for p in given))[1]


def _computed(node: Node, zeros: tuple[bool | None, ...]) -> tuple[bool, bool]:
    """Return whether an elementwise operator makes zeros, and whether its slopes are finite."""
    dtypes = tuple(val(n).dtype for n in tensor_inputs(node))
    literals = tuple(
        (name, value if _is_literal(value) else TensorRef(0))
        for name, value in bound_arguments(node).items()
    )
    return _sampled(node.target, literals, dtypes, tuple(zero is True for zero in zeros))


def _is_literal(value: object) -> bool:
    return not isinstance(value, (Node, list, tuple))


@lru_cache(maxsize=1024)
def _sampled(
    op: object,
    literals: tuple[tuple[str, object], ...],
    dtypes: tuple[torch.dtype, ...],
    zeros: tuple[bool, ...],
) -> tuple[bool, bool]:
    """Compute an elementwise operator on single numbers: zeros, and samples of anything else."""
    is_zero = has_slope = True
    for sample in (0.75, -1.25):
        inputs = [
            _number(0.0 if zero else sample + place, dtype).requires_grad_(
                zero and dtype.is_floating_point
            )
            for place, (dtype, zero) in enumerate(zip(dtypes, zeros, strict=True))
        ]
        following = iter(inputs)
        given = [next(following) if isinstance(v, TensorRef) else v for _, v in literals]
        schema = op._schema.arguments
        by_name = {a.name: v for a, v in zip(schema, given, strict=True) if a.kwarg_only}
        made = op(*given[: len(given) - len(by_name)], **by_name)
        is_zero = is_zero and bool((made == 0).all())
        if made.requires_grad:
            sources = [x for x in inputs if x.requires_grad]
            slopes = torch.autograd.grad(made.sum(), sources, allow_unused=True)
            has_slope = has_slope and all(s is None or bool(s.isfinite().all()) for s in slopes)
    return is_zero, has_slope


def _number(value: float, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.full((1,), value, dtype=torch.float64)
    return torch.full((1,), value > 0).to(dtype)
