"""Remove from a traced graph what computes nothing: autograd's noise, idle views, twins."""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.fx import Node

from autoshard.diagnostics import InternalError
from autoshard.ir.aliases import is_view
from autoshard.ir.graph_function import GraphFunction
from autoshard.ir.node_info import info
from autoshard.ops.collectives import copy_to, copy_within
from autoshard.ops.library import NAMESPACE

aten = torch.ops.aten

# Nodes that stand for their first argument. `copy_to` has done its work: its transpose, an
# all_reduce, is in the backward graph.
_IDENTITIES = frozenset({aten.detach.default, aten.alias.default, copy_to, copy_within})
_SAME_WHEN_SAME_SHAPE = frozenset(
    {aten.view.default, aten._unsafe_view.default, aten.expand.default}
)

_WRITERS = {  # what writes the piece that a view reads
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}


def tidy(function: GraphFunction) -> GraphFunction:
    """Clean ``function`` in place and return it; values and their order stay the same."""
    _make_functional(function)
    for node in list(function.graph.nodes):
        _shorten_view(node)
        stand_in = _stands_for(node)
        if stand_in is not None:
            node.replace_all_uses_with(stand_in)
            function.graph.erase_node(node)
    _merge_twins(function)
    erase_dead(function)
    return function


def _shorten_view(node: Node) -> None:
    """Let a view of a view of a contiguous value read that value itself."""
    if node.target is not aten.view.default:
        return
    source = node.args[0]
    while source.target in (aten.view.default, aten._unsafe_view.default):
        if not source.args[0].meta["val"].is_contiguous():
            break
        source = source.args[0]
    node.args = (source, *node.args[1:])


def _stands_for(node: Node) -> Node | None:
    """Return the earlier node whose value ``node`` repeats, or None."""
    if node.op != "call_function":
        return None
    if node.target in _IDENTITIES:
        return node.args[0]
    if node.target in _SAME_WHEN_SAME_SHAPE and _same_layout(node, node.args[0]):
        return node.args[0]
    if node.target is aten.t.default and node.args[0].target is aten.t.default:
        return node.args[0].args[0]
    return None


def _same_layout(a: Node, b: Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return x.shape == y.shape and x.stride() == y.stride()


def _merge_twins(function: GraphFunction) -> None:
    """Let equal operations on equal inputs be one node, within forward and within backward.

    Not across: a value of the forward pass would then be kept for the backward pass that autograd
    chose to compute again.
    """
    seen: dict[tuple[object, ...], Node] = {}
    for node in list(function.graph.nodes):
        if not _may_merge(node):
            continue
        # The text tells 1 from 1.0 and True; node names are unique.
        key = (node.target, info(node).phase, repr(node.args), repr(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            function.graph.erase_node(node)


def _may_merge(node: Node) -> bool:
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload):
        return True
    random = torch.Tag.nondeterministic_seeded in node.target.tags
    return not random and node.target.namespace != NAMESPACE


def erase_dead(function: GraphFunction) -> None:
    """Erase operations that nobody reads, then inputs that nobody reads."""
    for node in reversed(list(function.graph.nodes)):
        if node.op == "call_function" and not node.users:
            function.graph.erase_node(node)
    pairs = list(zip(function.inputs, function.placeholders, strict=True))
    function.inputs = tuple(port for port, node in pairs if node.users)
    for _, node in pairs:
        if not node.users:
            function.graph.erase_node(node)


def _make_functional(function: GraphFunction) -> None:
    """Replace in-place operations on fresh values, which some composite operations contain.

    What changes a piece of a fresh value, as the backward of a real Fourier transform does, becomes
    a new piece and a new whole.
    """
    for node in list(function.graph.nodes):
        op = node.target
        if not isinstance(op, OpOverload) or not op._schema.is_mutable:
            continue
        changed = node.args[0]
        packet = getattr(aten, op._schema.name.split("::")[1].removesuffix("_"), None)
        if packet is None or not _may_change(changed, node, _after(node)):
            raise InternalError(f"lowering left the in-place operation {op} in the graph")
        node.target = getattr(packet, op._overloadname)
        _become(changed, node)


def _may_change(value: Node, by: Node, later: set[Node]) -> bool:
    """Tell whether a value is fresh, and no view but ``by`` would keep showing its old elements."""
    views = [user for user in value.users if user not in later and is_view(user)]
    if value.op == "placeholder" or set(views) - {by}:
        return False
    return not is_view(value) or (
        value.target in _WRITERS and _may_change(value.args[0], value, later)
    )


def _become(old: Node, new: Node) -> None:
    """Let what follows ``new`` read it in place of ``old``; of a piece, the whole with it."""
    later = _after(new)
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user in later)
    if old.target not in _WRITERS:
        return
    whole = old.args[0]
    with new.graph.inserting_after(new):
        args = (whole, new, *old.args[1:])
        written = new.graph.call_function(_WRITERS[old.target], args, dict(old.kwargs))
    written.meta = dict(new.meta) | {"val": whole.meta["val"]}
    _become(whole, written)


def _after(node: Node) -> set[Node]:
    found, current = set(), node.next
    while current.op != "root":
        found.add(current)
        current = current.next
    return found
