"""Planted faults: each breaks a compiled Program in one place, and ``verify`` must see it.

A mutant returns True when it found a place to break. It works on a program after the last pass,
so a fault is what a wrong pass would have left there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from autoshard.ir.graph_function import BOUNDARY, GRAD, NORMALIZER, GraphFunction
from autoshard.ir.program import Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ops import collectives
from autoshard.schedule.action import Kind

aten = torch.ops.aten


@dataclass(frozen=True)
class Mutant:
    """A named fault and the function that plants it."""

    name: str
    what: str
    plant: Callable[[Program], bool]


def drop_collective(program: Program) -> bool:
    """Let the users of the first forward all_reduce over tp read its partial input."""
    for rewriter, node in _calls(program, "F", collectives.all_reduce):
        rewriter.replace(node, node.args[0])
        return True
    return False


def double_collective(program: Program) -> bool:
    """Reduce once more what the first forward all_reduce over tp has reduced."""
    for rewriter, node in _calls(program, "F", collectives.all_reduce):
        _after(rewriter, node, collectives.all_reduce, node.args[1])
        return True
    return False


def wrong_axis(program: Program) -> bool:
    """Reduce over dp what is partial over tp."""
    for rewriter, node in _calls(program, "F", collectives.all_reduce):
        rewriter.set_args(node, node.args[0], "dp")
        return True
    return False


def wrong_scale(program: Program) -> bool:
    """Average a gradient over the ranks of an axis where it must be summed."""
    reductions = (collectives.all_reduce, collectives.reduce_scatter)
    for phase in ("I", "W", "R"):
        for op in reductions:
            for rewriter, node in _calls(program, phase, op):
                _after(rewriter, node, aten.mul.Tensor, 0.5)
                return True
    return False


def lose_tied_gradient(program: Program) -> bool:
    """Leave a tied gradient as each stage, or one of its two uses, made it."""
    reductions = list(_calls(program, "R", collectives.tied_all_reduce))
    for rewriter, node in reductions:
        rewriter.replace(node, node.args[0])
    if reductions:
        return True
    tied = [spec.fqn for spec in program.params if spec.aliases]
    for function in (*_functions(program, "I"), *_functions(program, "W")):
        grads = function.named_results(GRAD)
        for name in tied:
            node = grads.get(name)
            if node is not None and node.target is aten.add.Tensor:
                Rewriter(function, "mutant").replace(node, node.args[0])
                return True
    return False


def sum_bias_twice(program: Program) -> bool:
    """Add a row-parallel bias before its all_reduce, so that every rank's copy is summed."""
    for rewriter, node in _calls(program, "F", collectives.all_reduce):
        add = next((u for u in node.users if u.target is aten.add.Tensor), None)
        bias = add and next((a for a in add.args if a is not node), None)
        if bias is None or bias.op != "placeholder":
            continue
        with rewriter.before(node):
            early = rewriter.call(aten.add.Tensor, node.args[0], bias, like=node)
        rewriter.set_args(node, early, node.args[1])
        rewriter.replace(add, node)
        return True
    return False


def swap_boundary(program: Program) -> bool:
    """Swap two values of a stage boundary, or the micro-batches of its first two sends."""
    for function in _functions(program, "F"):
        places = [i for i, port in enumerate(function.outputs) if port.kind == BOUNDARY]
        if len(places) > 1:
            values, (a, b) = list(function.results), places[:2]
            values[a], values[b] = values[b], values[a]
            function.set_outputs(values, function.outputs)
            return True
    return _swap_sends(program)


def localize_normalizer(program: Program) -> bool:
    """Divide by the tokens of one micro-batch of one rank instead of the global batch's."""
    terms = program.num_microbatches * program.mesh.size("dp")
    for function in _functions(program, "F"):
        for node in function.named(NORMALIZER).values():
            rewriter = Rewriter(function, "mutant")
            _after(rewriter, node, aten.mul.Tensor, float(terms))
            return terms > 1
    return False


FAULTS = (
    Mutant("drop-collective", "a forward all_reduce is missing", drop_collective),
    Mutant("double-collective", "a forward all_reduce is done twice", double_collective),
    Mutant("wrong-axis", "a reduction runs over another mesh axis", wrong_axis),
    Mutant("wrong-scale", "a gradient is averaged instead of summed", wrong_scale),
    Mutant("lose-tied-gradient", "one use of a tied weight does not count", lose_tied_gradient),
    Mutant("sum-bias-twice", "a row-parallel bias is summed over tp", sum_bias_twice),
    Mutant("swap-boundary", "two values of a stage boundary change places", swap_boundary),
    Mutant("localize-normalizer", "the loss counts local tokens only", localize_normalizer),
)


def _functions(program: Program, phase: str) -> Iterator[GraphFunction]:
    return (stage.phases[phase] for stage in program.stages if phase in stage.phases)


def _calls(program: Program, phase: str, op: object) -> Iterator[tuple[Rewriter, Node]]:
    for function in _functions(program, phase):
        for node in function.graph.find_nodes(op="call_function", target=op):
            yield Rewriter(function, "mutant"), node


def _after(rewriter: Rewriter, node: Node, op: object, *args: object) -> None:
    """Put ``op(node, *args)`` between ``node`` and all its users."""
    users = list(node.users)
    with rewriter.after(node):
        wrapped = rewriter.call(op, node, *args, like=node)
    for user in users:
        user.replace_input_with(node, wrapped)


def _swap_sends(program: Program) -> bool:
    if program.schedule is None:
        return False
    ranks = [list(row) for row in program.schedule.ranks]
    for row in ranks:
        sends = [i for i, action in enumerate(row) if action.kind is Kind.SEND_F]
        if len(sends) > 1:
            a, b = sends[:2]
            row[a], row[b] = row[b], row[a]
            program.schedule = replace(program.schedule, ranks=tuple(map(tuple, ranks)))
            return True
    return False
