"""How the tensor passes look at a graph along one axis: what is read, and what rules choose.

Shared by propagate-placements (which records outputs) and insert-collectives (which acts on what
inputs must become); both see the same choices because both ask here.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from autoshard.diagnostics import PlacementError
from autoshard.dsl.resolve import Resolved
from autoshard.ir.graph_function import PARAM, GraphFunction
from autoshard.ir.node_info import info, may_have_gradient, val
from autoshard.ir.placement import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard
from autoshard.ir.program import Program
from autoshard.ir.rules.call import Choice, call_of, tensor_inputs
from autoshard.ir.rules.table import choose
from autoshard.ops.dropout import dropout
from autoshard.passes._tokens import Tokens, count
from autoshard.source import Span


@dataclass(frozen=True)
class Reader:
    """Reads the placements of one graph along ``axis`` of ``size`` ranks.

    ``gathered`` are nodes whose value the plan wants whole behind them (``colwise(gather)``).
    ``tokens`` is there when the plan asks for sequence parallelism: then a sum over the ranks is
    scattered over the tokens where it would be made whole, and a whole value that has tokens is
    read as this rank's. What can't be computed on a part of the tokens gathers them by its rule.
    """

    axis: str
    size: int
    gathered: frozenset[Node] = frozenset()
    tokens: Tokens | None = None
    span: Span | None = None  # of the setting that asks for sequence parallelism

    def held(self, node: Node) -> Placement:
        """Return how the node's value lies."""
        return info(node).placement(self.axis)

    def read(self, node: Node) -> Placement:
        """Return how consumers take the value.

        A partial sum with several consumers is reduced once for all of them, instead of by each.
        """
        held = self.held(node)
        if node in self.gathered:
            return REPLICATE
        if isinstance(held, Partial) and len(node.users) > 1:
            return self.token_shard(node) or REPLICATE
        is_whole = isinstance(held, Replicate) and node.op == "call_function"
        is_whole = is_whole and may_have_gradient(val(node))
        return (self.token_shard(node) or held) if is_whole else held

    def choice(self, node: Node) -> Choice:
        """Return what the rule of a call decides on what it reads.

        A partial sum goes on only to join another one; dropout is cheaper on a part of the tokens.
        """
        call = call_of(node, self.size, axis=self.axis)
        ins = tuple(self.read(n) for n in tensor_inputs(node))
        choice = choose(call, ins)
        passes = PARTIAL in choice.outs and node.target is not dropout
        if self.tokens is None or PARTIAL not in ins or passes:
            return choice
        pairs = zip(tensor_inputs(node), ins, strict=True)
        scattered = tuple((p == PARTIAL and self.token_shard(n)) or p for n, p in pairs)
        return choose(call, scattered)

    def token_shard(self, node: Node) -> Shard | None:
        """Return how the value lies when each rank holds 1/n of the tokens, None if it has none.

        Raises PlacementError when a partial sum has tokens that don't divide.
        """
        found = self.tokens and self.tokens.along(node)
        if not found:
            return None
        length = count(node, found)
        if length % self.size == 0:
            return found
        if isinstance(self.held(node), Partial):
            raise self._indivisible(node, length)
        return None

    def _indivisible(self, node: Node, length: int) -> PlacementError:
        below = length // self.size * self.size
        fits = f"{below} or {below + self.size}" if below else str(self.size)
        record = info(node)
        return PlacementError(
            f"{length} tokens can't be split over {self.axis} = {self.size}",
            code="AS407",
            span=self.span,
            label=f"`{record.path}` computes {list(val(node).shape)}",
            help=(f"give or pad sequences to {fits} tokens", "or leave `sequence_parallel` off"),
            notes=(f"at {record.source}",) if record.source else (),
        )


def reader_of(program: Program, resolved: Resolved, axis: str) -> Reader:
    """Return the reader of the program's forward graph."""
    gathered = _gathered(program, resolved)
    plan = resolved.plan
    tokens = Tokens.of(program.forward.graph) if plan.tensor.sequence_parallel else None
    span = plan.span("tensor.sequence_parallel")
    return Reader(axis, program.mesh.size(axis), gathered, tokens, span)


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
        if may_have_gradient(val(node)) and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found
