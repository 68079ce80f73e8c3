"""How the operators of an exported graph are written in ours: views, casts and copies once each.

Most models need no more than this. A graph that writes in place, or holds a composite view that is
not listed here, is first made functional by torch, which costs as much again as the export.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from autoshard.compat import is_composite

aten = torch.ops.aten

# Nodes that only say what is already known.
ERASED = frozenset({aten._assert_tensor_metadata.default, aten._assert_scalar.default})
# Nodes that give their first argument: in a functional graph nobody can tell the copy apart.
IDENTITIES = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.lift_fresh_copy.default,
        aten.lift_fresh.default,
        aten.lift.default,
        aten.detach_.default,
    }
)
# One spelling: reshape works whatever the strides, so dropping a copy before it is safe.
RESHAPES = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.reshape_as.default,
        aten.view_as.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
    }
)
EXPANDS = frozenset({aten.expand.default, aten.expand_as.default})
# Where a value lies is not the graph's business: a cast that keeps the type is none.
CASTS = frozenset(
    {
        aten.to.dtype,
        aten.to.device,
        aten.to.dtype_layout,
        aten.to.other,
        aten.type_as.default,
        aten._to_copy.default,
    }
)
_KNOWN = ERASED | IDENTITIES | RESHAPES | EXPANDS | CASTS | {aten.dropout.default}

Make = Callable[..., Node]


def respell(node: Node, args: tuple, kwargs: dict, make: Make) -> Node:
    """Write ``node`` on its new ``args`` by ``make(op, *args, **kwargs)``, or return its equal."""
    value, target = node.meta["val"], node.target
    if target in IDENTITIES:
        return args[0]
    if target in RESHAPES:
        return make(aten.reshape.default, args[0], list(value.shape))
    if target in EXPANDS:
        return make(aten.expand.default, args[0], list(value.shape))
    if target in CASTS:
        return _cast(args[0], value, make)
    if target is aten.copy.default:
        return _copy(args[1], value, make)
    return make(target, *args, **kwargs)


def _cast(source: Node, value: torch.Tensor, make: Make) -> Node:
    if source.meta["val"].dtype == value.dtype:
        return source
    return make(aten._to_copy.default, source, dtype=value.dtype)


def _copy(source: Node, value: torch.Tensor, make: Make) -> Node:
    """Functional copy_, which has no derivative: the source, in the type and shape it gets."""
    source = _cast(source, value, make)
    if source.meta["val"].shape == value.shape:
        return source
    return make(aten.expand.default, source, list(value.shape))


def is_functional(graph: Graph) -> bool:
    """Tell whether ``graph`` can be taken as it is: it writes nothing and hides no view."""
    return all(_is_plain(node) for node in graph.nodes)


def _is_plain(node: Node) -> bool:
    op = node.target
    if node.op != "call_function" or op in _KNOWN:
        return node.op != "get_attr"
    if not isinstance(op, torch._ops.OpOverload):
        return not isinstance(op, torch._ops.HigherOrderOperator)
    if op._schema.is_mutable or torch.Tag.maybe_aliasing_or_mutating in op.tags:
        return False
    is_view = any(argument.alias_info is not None for argument in op._schema.arguments)
    return not (is_view and is_composite(op))
