"""Rewriter: the only way passes make or change nodes, so that none lacks shape or origin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.fx import Node

from autoshard.diagnostics import InternalError
from autoshard.ir.fakes import refake
from autoshard.ir.graph_function import GraphFunction, Port, copy_node
from autoshard.ir.node_info import NodeInfo, info, set_info
from autoshard.ir.placement import Placements
from autoshard.source import Span


class Rewriter:
    """Edits one GraphFunction on behalf of one pass.

    Every node made here has a fake value (computed by running the op on its inputs' fakes) and an
    origin copied from ``like``, the node it stands for.
    """

    def __init__(self, function: GraphFunction, pass_name: str) -> None:
        self.function = function
        self.graph = function.graph
        self.pass_name = pass_name

    @contextmanager
    def before(self, node: Node) -> Iterator[None]:
        """Insert what is made inside right before ``node``."""
        with self.graph.inserting_before(node):
            yield

    @contextmanager
    def after(self, node: Node) -> Iterator[None]:
        """Insert what is made inside right after ``node`` (after all placeholders for one)."""
        anchor = node
        if node.op == "placeholder":
            anchor = self.function.placeholders[-1]
        with self.graph.inserting_before(anchor.next):
            yield

    def call(
        self,
        op: Callable[..., object],
        *args: object,
        like: Node,
        placements: Placements | None = None,
        span: Span | None = None,
        role: str | None = None,
        **kwargs: object,
    ) -> Node:
        """Make a node ``op(*args, **kwargs)`` with the origin of ``like``."""
        node = self.graph.call_function(op, args, kwargs)
        self.refake(node)
        record = info(like)
        set_info(
            node,
            replace(
                record,
                placements=record.placements if placements is None else placements,
                span=span or record.span,
                role=record.role if role is None else role,
                passes=(*record.passes, self.pass_name),
            ),
        )
        return node

    def repeat(self, node: Node, copies: Mapping[Node, Node], *, phase: str, role: str) -> Node:
        """Make a copy of ``node`` that reads ``copies`` where there are, for another phase."""
        copy = copy_node(self.graph, node, lambda arg: copies.get(arg, arg))
        record = info(node)
        passes = (*record.passes, self.pass_name)
        set_info(copy, replace(record, phase=phase, role=role, passes=passes))
        return copy

    def placeholder(self, port: Port, value: torch.Tensor, record: NodeInfo | None = None) -> Node:
        """Append an input port and return its placeholder; ``value`` is its fake tensor."""
        nodes = self.function.placeholders
        anchor = nodes[-1].next if nodes else next(iter(self.graph.nodes))
        with self.graph.inserting_before(anchor):
            node = self.graph.placeholder(legal_name(port))
        node.meta["val"] = value
        set_info(node, replace(record or NodeInfo(), passes=(self.pass_name,)))
        self.function.inputs = (*self.function.inputs, port)
        return node

    def drop_input(self, port: Port) -> None:
        """Remove an input port whose placeholder has no users."""
        index = self.function.inputs.index(port)
        self.graph.erase_node(self.function.placeholders[index])
        self.function.inputs = tuple(p for i, p in enumerate(self.function.inputs) if i != index)

    def refake(self, node: Node) -> None:
        """Recompute the node's fake value from its inputs' fake values."""
        refake(node, self.fake_mode())

    def set_args(self, node: Node, *args: object, span: Span | None = None) -> None:
        """Give ``node`` new positional arguments, recompute its fake value, record the pass."""
        node.args = args
        self.refake(node)
        self.annotate(node, span=span)

    def annotate(
        self, node: Node, *, placements: Placements | None = None, span: Span | None = None
    ) -> None:
        """Record that this pass touched ``node``, with its new placements or plan line."""
        record = info(node)
        passes = record.passes
        if self.pass_name not in passes[-1:]:
            passes = (*passes, self.pass_name)
        set_info(
            node,
            replace(
                record,
                placements=record.placements if placements is None else placements,
                span=span or record.span,
                passes=passes,
            ),
        )

    def replace(self, old: Node, new: Node) -> None:
        """Let every user of ``old`` read ``new`` and erase ``old``."""
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)

    def sweep(self) -> int:
        """Erase nodes nobody reads and return how many; what returns nothing is there to stay."""
        erased = 0
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users and _returns(node.target):
                self.graph.erase_node(node)
                erased += 1
        return erased

    def fake_mode(self) -> torch._subclasses.FakeTensorMode:
        """Return the mode that the graph's fake values belong to."""
        for node in self.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch._subclasses.FakeTensor):
                return value.fake_mode
        raise InternalError("the graph has no fake value")


def _returns(op: object) -> bool:
    """Tell whether an operation gives a value (getitem does; `release` doesn't)."""
    return not isinstance(op, torch._ops.OpOverload) or bool(op._schema.returns)


def legal_name(port: Port) -> str:
    """Return an identifier for a port's placeholder: ``param:h.0.w`` -> ``param_h_0_w``."""
    text = f"{port.kind}_{port.name}" if port.name else port.kind
    return "".join(c if c.isalnum() else "_" for c in text)
