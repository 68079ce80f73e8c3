"""Check in which number types operators compute: as the plan's `precision` block says.

Erasure reads through casts and numbers run in float64, where there are none; so each cast is
accounted for here, in the graphs that ranks run. The lists are this file's own, by the names that
operators have after lowering: what the pass decided is not asked. Not followed is how one half
precision value differs from the same one computed in float32 in between.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._ops import OpOverload
from torch.fx import Node

from autoshard.ir.graph_function import FLAT, GRAD, PARAM, GraphFunction
from autoshard.ir.node_info import info, origin, val
from autoshard.ir.precision import HALVES
from autoshard.ir.program import Program, Stage
from autoshard.ops import collectives

aten = torch.ops.aten
ON_BUCKETS = collectives.ON_BUCKETS
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"})
# What makes products out of operators that choose no type for them.
HIDES_PRODUCTS = frozenset({"cdist", "tensordot", "inner", "kron", "outer"})
# Where torch has no kernel for its inputs (a mask with a gradient), it spells attention out, and
# widens what it multiplies and rounds the result itself.
ATTENTION = frozenset({"scaled_dot_product_attention"})
BATCHED = frozenset({"bmm", "baddbmm"})
_MOVES = """
    view reshape _unsafe_view t transpose permute expand slice select unsqueeze squeeze clone alias
    detach split split_with_sizes view_at copy_to getitem wait all_gather all_gather_start pack
    shard
"""
MOVES = frozenset(_MOVES.split())


def check_compute_types(program: Program) -> Iterator[str]:
    """Say which operator computes, or which value is rounded, in another type than the plan's."""
    if program.precision is None:
        return
    for stage in program.stages:
        called = _called(stage)
        for phase in ("F", "I", "W"):
            function = stage.phases.get(phase)
            if function is not None:
                where = f"stage {stage.index}, {phase}"
                yield from _check(program, function, called, where)


def _called(stage: Stage) -> dict[str, set[str]]:
    """Return module path -> names of the operators that the model calls there."""
    called: dict[str, set[str]] = {}
    for node in stage.forward.graph.nodes:
        if node.op == "call_function":
            name = "half" if _is_narrowing(node) and not info(node).role else _name(node)
            called.setdefault(info(node).path, set()).add(name)
    return called


def _check(
    program: Program, function: GraphFunction, called: dict[str, set[str]], where: str
) -> Iterator[str]:
    assert program.precision is not None
    compute = program.precision.compute
    stored = {*function.named(PARAM).values(), *function.named(FLAT).values()}
    grads = set(function.named_results(GRAD).values())
    for node in function.graph.nodes:
        if node.op != "call_function":
            continue
        name, here = _name(node), called.get(info(node).path, set())
        read = [n for n in node.all_input_nodes if _is_float(n)]
        spells_attention = bool(here & ATTENTION)
        if spells_attention and (name in BATCHED or "softmax" in name or _is_narrowing(node)):
            continue
        if name in PRODUCTS and not here & HIDES_PRODUCTS:
            yield from _told(where, node, read, compute, [n for n in read if _type(n) != compute])
        elif _is_wide(name):
            narrow = [n for n in read if _type(n) in HALVES]
            yield from _told(where, node, read, torch.float32, narrow)
        elif _is_narrowing(node) and "half" not in here and _is_lost(node, here, stored, grads):
            yield (
                f"{where}: {node.args[0]} in {origin(node)} is rounded to {_type(node)} and "
                f"nothing that reads it computes in {_type(node)}"
            )


def _told(
    where: str, node: Node, read: list[Node], wanted: torch.dtype, wrong: list[Node]
) -> Iterator[str]:
    if wrong:
        place = [f"%{n.name} ({_type(n)})" for n in wrong]
        yield (
            f"{where}: {node.target} in {origin(node)} reads {', '.join(place)} and must compute "
            f"in {wanted}"
        )


def _is_lost(cast: Node, here: set[str], stored: set[Node], grads: set[Node | None]) -> bool:
    """Tell whether a value is rounded for nothing: all that read it widen it again.

    A norm or a softmax gives its result in the type of its input, and reads it in float32; so what
    such an operator computed may be rounded between it and the next one, and on the way back.
    """
    source, readers = _root(cast), list(_readers(cast))
    if any(node.op == "output" for node in readers):
        return False  # read by another phase
    widened = [node for node in readers if _is_widening(node)]
    if not readers or len(widened) != len(readers):
        return False
    if source in stored:
        return True
    ends = [reader for node in widened for reader in _readers(node)]
    if grads.issuperset(widened) or (ends and all(n.target in ON_BUCKETS for n in ends)):
        return True  # a parameter's gradient: nothing reads it but its sum
    return not any(_gives_back(_name(node), here) for node in (source, *ends))


def _gives_back(name: str, here: set[str]) -> bool:
    """Tell whether an operator reads float32 and gives its result in the type of its input."""
    if "log_softmax" in name and any("cross_entropy" in called for called in here):
        return False  # inside a loss
    return "norm" in name or "softmax" in name


def _root(node: Node) -> Node:
    """Return what a value was before it was moved and cast."""
    while node.op == "call_function" and (_name(node) in MOVES or node.target in _CASTS):
        node = node.all_input_nodes[0]
    return node


def _readers(node: Node) -> Iterator[Node]:
    """Yield what reads a value, through what only moves it."""
    for user in node.users:
        if user.target is collectives.release:
            continue
        if user.op == "call_function" and _name(user) in MOVES:
            yield from _readers(user)
        else:
            yield user


_CASTS = (aten._to_copy.default,)


def _is_narrowing(node: Node) -> bool:
    return _changes(node) and _type(node) in HALVES and _type(node.args[0]) not in HALVES


def _is_widening(node: Node) -> bool:
    return _changes(node) and _type(node) not in HALVES and _type(node.args[0]) in HALVES


def _changes(node: Node) -> bool:
    """Tell whether a node casts one floating-point type to another."""
    is_cast = node.target in _CASTS and _is_float(node) and _is_float(node.args[0])
    return is_cast and _type(node) != _type(node.args[0])


def _is_wide(name: str) -> bool:
    """Tell whether an operator computes in float32 and reads nothing narrower."""
    is_loss = "cross_entropy" in name or "loss" in name
    return is_loss or "softmax" in name or name.startswith(("native_", "rms_norm", "_fused_rms"))


def _name(node: Node) -> str:
    """Return the bare name of what a node calls: "mm" of ``aten.mm.default``."""
    if isinstance(node.target, OpOverload):
        return node.target._schema.name.split("::")[-1]
    return getattr(node.target, "__name__", "")


def _is_float(node: object) -> bool:
    value = val(node) if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _type(node: Node) -> torch.dtype:
    return val(node).dtype
