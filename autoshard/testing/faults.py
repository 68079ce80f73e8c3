"""A fault as code: where it can be planted in a compiled program, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch.fx import Node

from autoshard.ir.graph_function import GraphFunction
from autoshard.ir.program import Program
from autoshard.ir.rewrite import Rewriter

Plant = Callable[[], object]
PHASES = ("F", "I", "W")
EVERY = (*PHASES, "U", "R")
PASS_NAME = "mutant"


@dataclass(frozen=True)
class Fault:
    """A named fault; ``places(program)`` yields one function for each place to plant it.

    It works on a program after the last pass, so it is what a wrong pass would have left there.
    """

    name: str
    what: str
    places: Callable[[Program], Iterator[Plant]]

    def plant(self, program: Program, place: int = 0) -> bool:
        """Plant the fault at its ``place``-th place; False when there are not so many."""
        for number, plant in enumerate(self.places(program)):
            if number == place:
                plant()
                return True
        return False

    def count(self, program: Program) -> int:
        """Return in how many places it can be planted."""
        return sum(1 for _ in self.places(program))


def functions(program: Program, phases: tuple[str, ...] = PHASES) -> Iterator[GraphFunction]:
    """Yield the graphs of some phases, stage by stage."""
    for stage in program.stages:
        for phase in phases:
            if phase in stage.phases:
                yield stage.phases[phase]


def calls(
    program: Program, ops: object, phases: tuple[str, ...] = PHASES
) -> Iterator[tuple[Rewriter, Node]]:
    """Yield every call of one of ``ops`` in some phases, with the rewriter of its graph."""
    wanted = ops if isinstance(ops, (tuple, frozenset)) else (ops,)
    for function in functions(program, phases):
        for node in tuple(function.graph.nodes):
            if node.op == "call_function" and node.target in wanted:
                yield Rewriter(function, PASS_NAME), node


def after(rewriter: Rewriter, node: Node, op: object, *args: object, **options: object) -> None:
    """Put ``op(node, *args, **options)`` between ``node`` and all its users."""
    users = list(node.users)
    with rewriter.after(node):
        wrapped = rewriter.call(op, node, *args, like=node, **options)
    for user in users:
        user.replace_input_with(node, wrapped)


def bypass(rewriter: Rewriter, node: Node, value: Node) -> Plant:
    """Return the plant that lets the users of ``node`` read ``value`` instead."""
    return lambda: rewriter.replace(node, value)


def alike(nodes: list[Node]) -> Iterator[tuple[Node, Node]]:
    """Yield neighbours among nodes whose values have one shape and type: they may be swapped."""
    by_type: dict[object, Node] = {}
    for node in nodes:
        value = node.meta["val"]
        key = (tuple(value.shape), value.dtype)
        if key in by_type:
            yield by_type[key], node
        by_type[key] = node


def swap_readers(a: Node, b: Node) -> None:
    """Let the users of ``a`` read ``b`` and those of ``b`` read ``a``."""
    of_a, of_b = list(a.users), list(b.users)
    for user in dict.fromkeys((*of_a, *of_b)):
        swapped = {a: b, b: a}
        user.args = _mapped(user.args, swapped)
        user.kwargs = _mapped(user.kwargs, swapped)


def set_bucket(program: Program, index: int, **changes: object) -> None:
    """Change what one bucket is."""
    buckets = list(program.buckets)
    buckets[index] = replace(buckets[index], **changes)
    program.buckets = tuple(buckets)


def _mapped(value: object, swapped: dict[Node, Node]) -> object:
    from_node = swapped.get(value) if isinstance(value, Node) else None
    if from_node is not None:
        return from_node
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(item, swapped) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(item, swapped) for key, item in value.items()}
    return value
