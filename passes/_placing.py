"""How the tensor passes look at a graph along one axis: what is read, and what rules choose.

Shared by propagate-placements (which records outputs) and insert-collectives (which acts on what
inputs must become); both see the same choices because both ask here.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch.fx import Node

from autoshard.dsl.resolve import Resolved
from autoshard.ir.graph_function import PARAM, GraphFunction
from autoshard.ir.node_info import info, val
from autoshard.ir.placement import REPLICATE, Partial, Placement
from autoshard.ir.program import Program
from autoshard.ir.rules.call import Choice, call_of, tensor_inputs
from autoshard.ir.rules.table import choose


@dataclass(frozen=True)
class Reader:
    """Reads the placements of one graph along ``axis`` of ``size`` ranks.

    ``gathered`` are nodes whose value the plan wants whole behind them (``colwise(gather)``).
    """

    axis: str
    size: int
    gathered: frozenset[Node] = frozenset()

    def held(self, node: Node) -> Placement:
        """Return how the node's value lies."""
        return info(node).placement(self.axis)

    def read(self, node: Node) -> Placement:
        """Return how consumers take the value.

        A partial sum with several consumers is reduced once for all of them, instead of by each.
        """
        held = self.held(node)
        shared = isinstance(held, Partial) and len(node.users) > 1
        return REPLICATE if shared or node in self.gathered else held

    def choice(self, node: Node) -> Choice:
        """Return what the rule of a call decides on what it reads."""
        ins = tuple(self.read(n) for n in tensor_inputs(node))
        return choose(call_of(node, self.size, axis=self.axis), ins)


def reader_of(program: Program, resolved: Resolved, axis: str) -> Reader:
    """Return the reader of the program's forward graph."""
    gathered = _gathered(program, resolved)
    return Reader(axis, program.mesh.size(axis), gathered)


def _gathered(program: Program, resolved: Resolved) -> frozenset[Node]:
    """Return the calls whose weight belongs to a rule with ``gather``."""
    wanted = {
        program.params[name].fqn: rule.path
        for rule in resolved.tensor.values()
        if rule.options.get("gather")
        for name in (rule.path, f"{rule.path}.weight")
        if name in program.params
    }
    found = set()
    for fqn, node in program.forward.named(PARAM).items():
        if fqn in wanted:
            found |= {n for n in _readers(node) if _inside(info(n).path, wanted[fqn])}
    return frozenset(found)


def _readers(weight: Node) -> list[Node]:
    """Return the calls that compute with a weight, through transposes."""
    found = []
    for user in weight.users:
        turned = len(tensor_inputs(user)) == 1 if user.op == "call_function" else False
        found += _readers(user) if turned else [user]
    return found


def _inside(path: str, module: str) -> bool:
    return path == module or module.startswith(f"{path}.") or path.startswith(f"{module}.")


def needs_grad(program: Program) -> set[Node]:
    """Return the nodes of the forward graph through which some parameter gets its gradient."""
    function: GraphFunction = program.forward
    found = {n for fqn, n in function.named(PARAM).items() if program.params[fqn].requires_grad}
    for node in function.graph.nodes:
        if node.op != "call_function" or "detach" in str(node.target):
            continue
        floating = node.target is operator.getitem or _is_float(node)
        if floating and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _is_float(node: Node) -> bool:
    value = val(node)
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(v is not None and v.is_floating_point() for v in values)
