"""Split each stage's joint graph into forward, input gradient and weight gradient.

Zero-bubble schedules (Qi et al. 2023) need the two halves of backward apart; all schedules need the
list of values that forward keeps. Halves are found by dependence alone, as by dead-code
elimination. This pass does not trade memory for recomputation.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from autoshard.compiler.pass_base import Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.diagnostics import PassError
from autoshard.dsl.resolve import Resolved
from autoshard.ir.aliases import cheap_base, is_cheap
from autoshard.ir.extract import ancestors, extract
from autoshard.ir.graph_function import BOUNDARY, GRAD, SAVED, TANGENT, GraphFunction, Port
from autoshard.ir.node_info import info
from autoshard.ir.program import Level, Program
from autoshard.passes._schedules import compute_schedule
from autoshard.schedule import Kind
from autoshard.units import show_bytes

Ported = tuple[Port, Node]


@register
@dataclass(frozen=True)
class SplitPhases(Pass):
    """Divide the joint graph into phases F, I and W and say what is kept between them.

        joint(x, w, dy) = y, dx, dw  -->  F(x, w) = y, saved x
                                          I(w, dy) = dx
                                          W(saved x, dy) = dw

    F keeps each storage once. Views are never kept: they are made again beside their first use,
    those of parameters among them, so that a gathered parameter can be freed between the phases.
    I computes what gradients of boundary inputs need; W the rest, after I. A schedule that never
    runs them apart gets all of backward in I and an empty W: then what a layer kept is freed as
    soon as backward has passed it.
    """

    name: ClassVar[str] = "split-phases"
    group: ClassVar[str] = "joint"
    level: ClassVar[Level] = Level.JOINT
    assumes: ClassVar[frozenset[str]] = frozenset({"joint"})
    establishes: ClassVar[frozenset[str]] = frozenset({"phased"})

    weights: str = "auto"  # "apart": in W; "together": in I; "auto": as the plan's schedule needs

    def run(self, program: Program, ctx: PassContext) -> None:
        """Fill ``stage.phases`` of every stage."""
        apart = self._apart(ctx.resolved)
        for stage in program.stages:
            if stage.phases or stage.joint is None:
                continue
            split = _Split(stage.joint, apart)
            stage.phases = split.phases() if program.training else {"F": split.forward()}
            ctx.note(f"stage {stage.index}", split.summary())

    def _apart(self, resolved: Resolved) -> bool:
        if self.weights not in ("auto", "apart", "together"):
            raise PassError(
                f"option 'weights' of '{self.name}' can't be '{self.weights}'",
                help="one of: auto, apart, together",
            )
        if self.weights != "auto":
            return self.weights == "apart"
        rows = compute_schedule(resolved).ranks
        return any(action.kind is Kind.I for row in rows for action in row)


class _Split:
    """Which operation belongs to which phase, and what passes between phases.

    Cheap values (views) belong to none: each phase makes those it reads.
    """

    def __init__(self, joint: GraphFunction, apart: bool) -> None:
        self._nodes = tuple(joint.graph.nodes)
        self._inputs = list(zip(joint.inputs, joint.placeholders, strict=True))
        pairs = list(zip(joint.outputs, joint.results, strict=True))
        self._y = [(p, n) for p, n in pairs if p.kind not in (GRAD, TANGENT)]
        self._dx = [(p, n) for p, n in pairs if p.kind == TANGENT or (p.kind == GRAD and not apart)]
        self._dw = [(p, n) for p, n in pairs if p.kind == GRAD and apart]
        placeholders = frozenset(joint.placeholders)
        backward = ancestors(_values([*self._dx, *self._dw]), placeholders)
        kept = [n for n in backward if info(n).phase == "F" and not is_cheap(n)]
        self._f = _operations(ancestors([*kept, *_values(self._y)], placeholders))
        self._i = _operations(ancestors(_values(self._dx), placeholders | self._f))
        self._w = _operations(ancestors(_values(self._dw), placeholders | self._f | self._i))
        boundary = {n for p, n in self._inputs if p.kind == BOUNDARY}
        names = _SavedNames()
        uses_i, uses_w = self._uses(self._i, self._dx), self._uses(self._w, self._dw)
        self._from_f = names.ported(self._kept(self._f | boundary, [*uses_i, *uses_w]))
        self._from_i = names.ported(self._kept(self._i, uses_w))

    def phases(self) -> dict[str, GraphFunction]:
        """Return the three phases of a training stage."""
        later = [(port, node) for port, node in self._inputs if port.kind != BOUNDARY]
        i_inputs = [*later, *self._from_f]
        return {
            "F": self.forward(),
            "I": self._phase(i_inputs, self._i, [*self._dx, *self._from_i]),
            "W": self._phase([*i_inputs, *self._from_i], self._w, self._dw),
        }

    def forward(self) -> GraphFunction:
        """Return F: the outputs of the stage and what backward reads of it."""
        return self._phase(self._inputs, self._f, [*self._y, *self._from_f])

    def summary(self) -> str:
        """Return how much is kept, for a remark."""
        values = [node.meta["val"] for _, node in self._from_f]
        nbytes = sum(value.numel() * value.element_size() for value in values)
        kept = "1 value" if len(values) == 1 else f"{len(values)} values"
        return f"forward keeps {kept}, {show_bytes(nbytes)}, per microbatch"

    def _uses(self, body: set[Node], outputs: list[Ported]) -> list[Node]:
        """Return what a phase reads that it doesn't compute, in order."""
        read = {arg for node in body for arg in node.all_input_nodes} | set(_values(outputs))
        return [n for n in self._nodes if n in read and cheap_base(n) not in body]

    def _kept(self, made: set[Node], uses: Iterable[Node]) -> list[Node]:
        """Return what to keep of an earlier phase's values: of each storage one value."""
        by_base: dict[Node, set[Node]] = {}
        for node in uses:
            if cheap_base(node) in made:
                by_base.setdefault(cheap_base(node), set()).add(node)
        return [_representative(base, by_base[base]) for base in self._nodes if base in by_base]

    def _phase(
        self, inputs: list[Ported], body: set[Node], outputs: list[tuple[Port, Node | None]]
    ) -> GraphFunction:
        order = _Order({node for _, node in inputs})
        # A gradient that is a view stands where it is made: it can be reduced or summed from there.
        made: dict[Node, list[Node]] = {}
        for port, node in outputs:
            if port.kind == GRAD and node is not None and is_cheap(node):
                made.setdefault(cheap_base(node), []).append(node)
        for node in self._nodes:
            if node in body:
                order.add(node)
                for view in made.get(node, ()):
                    order.need(view)
        for node in _values(outputs):
            order.need(node)
        return extract(inputs, order.body, outputs)


class _Order:
    """Collects a phase's operations in order, each view right before its first use."""

    def __init__(self, given: set[Node]) -> None:
        self.body: list[Node] = []
        self._known = given

    def add(self, node: Node) -> None:
        """Append an operation, after the views that it reads."""
        for arg in node.all_input_nodes:
            self.need(arg)
        self._known.add(node)
        self.body.append(node)

    def need(self, node: Node) -> None:
        """Make ``node`` readable: append it, if it is a view that isn't there yet."""
        if node not in self._known:
            assert is_cheap(node), f"%{node} is read by a phase that doesn't have it"
            self.add(node)


class _SavedNames:
    """Names kept values after the module and the operation that make them."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def ported(self, nodes: Iterable[Node]) -> list[Ported]:
        """Return the nodes with a port each, no name twice."""
        return [(Port(SAVED, self._name(node)), node) for node in nodes]

    def _name(self, node: Node) -> str:
        text = f"{info(node).path or 'root'}:{_operation(node)}"
        names = (text if n == 1 else f"{text}#{n}" for n in range(1, len(self._taken) + 2))
        name = next(name for name in names if name not in self._taken)
        self._taken.add(name)
        return name


def _operation(node: Node) -> str:
    """Return a short name for what makes ``node``: `gelu`, `native_layer_norm.1`, `input`."""
    if node.op == "placeholder":
        return "input"
    if node.target is operator.getitem:
        return f"{_operation(node.args[0])}.{node.args[1]}"
    return node.target._schema.name.split("::")[-1].removeprefix("_")


def _representative(base: Node, uses: set[Node]) -> Node:
    """Return what stands for a storage: the one view that is read of it, or the base.

    A view that shows only a part, or shows elements twice, never stands for its base.
    """
    only = next(iter(uses))
    if len(uses) > 1 or not isinstance(only.meta["val"], torch.Tensor):
        return base
    a, b = only.meta["val"], base.meta["val"]
    return only if (a.numel(), a.dtype) == (b.numel(), b.dtype) else base


def _operations(nodes: set[Node]) -> set[Node]:
    """Return the nodes that aren't cheap, with the items picked from their tuples."""
    picked = {user for node in nodes for user in node.users if user.target is operator.getitem}
    return {node for node in nodes | picked if not is_cheap(node)}


def _values(ported: Iterable[tuple[Port, Node | None]]) -> Iterator[Node]:
    return (node for _, node in ported if node is not None)
