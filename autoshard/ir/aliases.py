"""Which values are views, and of what: several names for one storage.

A view costs no memory and next to no time, so it is never kept from one phase for the next: it is
made again beside its use.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import cache

import torch
from torch._ops import OpOverload
from torch.fx import Node

from autoshard.ops.collectives import from_copies, view_at

aten = torch.ops.aten

# Aliases of their input although their schema doesn't say so.
_HIDDEN_VIEWS = frozenset({aten._unsafe_view.default, view_at, from_copies})


def is_view(node: Node) -> bool:
    """Tell whether ``node`` names storage that its first argument already holds."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])
    return _returns_alias(node.target)


def view_base(node: Node) -> Node:
    """Return the node whose storage ``node`` names: itself when it is no view."""
    while is_view(node):
        node = node.args[0]
    return node


def is_cheap(node: Node) -> bool:
    """Tell whether ``node`` is made again rather than kept.

    So are views, inputs in a new dtype, and values in a wider one: the narrow value is kept.
    """
    if node.target is aten._to_copy.default:
        return view_base(node.args[0]).op == "placeholder" or _widens(node)
    return is_view(node)


def _widens(node: Node) -> bool:
    wide, narrow = node.meta["val"].dtype, node.args[0].meta["val"].dtype
    are_floats = wide.is_floating_point and narrow.is_floating_point
    return are_floats and wide.itemsize > narrow.itemsize


def cheap_base(node: Node) -> Node:
    """Return what ``node`` is made again from: itself when it isn't cheap."""
    while is_cheap(node):
        node = node.args[0]
    return node


@cache
def _returns_alias(op: object) -> bool:
    if op in _HIDDEN_VIEWS or not isinstance(op, OpOverload):
        return op in _HIDDEN_VIEWS
    aliases = [result.alias_info for result in op._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def lifetime_end(node: Node, order: Mapping[Node, int]) -> Node:
    """Return the last node, by ``order``, that reads ``node`` or any view of it."""
    last, pending = node, [node]
    while pending:
        for user in pending.pop().users:
            if order[user] > order[last]:
                last = user
            if is_view(user):
                pending.append(user)
    return last
