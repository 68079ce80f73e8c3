"""Counts over the global batch: the prelude program and the NORMALIZER inputs that it feeds."""

from __future__ import annotations

from functools import partial

import torch
from torch.fx import Node

from autoshard.diagnostics import PassError
from autoshard.ir.extract import ancestors, extract
from autoshard.ir.graph_function import BATCH, BUFFER, COUNT, NORMALIZER, GraphFunction, Port
from autoshard.ir.node_info import info, val
from autoshard.ir.placement import REPLICATE, Placements
from autoshard.ir.program import Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ir.rules.call import bound_arguments

aten = torch.ops.aten


class Counts:
    """Collects the counts that a program needs; each distinct one gets one NORMALIZER.

    A normalizer is 1 / (the count summed over all micro-batches and data-parallel ranks).
    """

    def __init__(self, program: Program, rewriter: Rewriter) -> None:
        self.program, self.rewriter = program, rewriter
        self.made: dict[tuple, tuple[Node, Node]] = {}  # key -> (count, normalizer)

    def valid(self, loss: Node, target: Node) -> Node:
        """Return the normalizer of a classification loss: the targets that aren't ignored.

        With class weights each counts as the weight of its class.
        """
        given = bound_arguments(loss)
        weight, ignored = given.get("weight"), given["ignore_index"]
        key = (target, ignored, weight, val(loss).dtype)
        if key not in self.made:
            self.require_batch_only(target, loss)
            if weight is not None:
                self.require_known(weight, loss)
            count = self.count(loss, target, weight, ignored)
            self.made[key] = (count, self.normalizer(val(loss).dtype))
        return self.made[key][1]

    def count(self, loss: Node, target: Node, weight: Node | None, ignored: int) -> Node:
        """Return what one micro-batch's mean is divided by."""
        call = partial(self.rewriter.call, like=loss)
        if weight is None:
            return call(aten.sum.default, call(aten.ne.Scalar, target, ignored))
        hidden = call(aten.eq.Scalar, target, ignored)
        safe = call(aten.masked_fill.Scalar, target, hidden, 0)
        found = call(aten.index.Tensor, weight, [safe])
        return call(aten.sum.default, call(aten.masked_fill.Scalar, found, hidden, 0))

    def can_count(self, value: Node) -> bool:
        """Tell whether a sum over the batch is a number that the batch alone determines."""
        return val(value).dim() == 0 and not self.foreign(value)

    def replace_sum(self, node: Node, value: Node) -> list[Node]:
        """Let ``node`` read the global value of a sum over the batch."""
        key = (value,)
        dtype = val(value).dtype if val(value).is_floating_point() else torch.get_default_dtype()
        if key not in self.made:
            self.made[key] = (value, self.normalizer(dtype))
        normalizer = self.made[key][1]
        is_quotient = node.target is aten.div.Tensor and node.args[1] is value
        with self.rewriter.before(node):
            if is_quotient:
                args = (node.args[0], normalizer)
                made = [self.rewriter.call(aten.mul.Tensor, *args, like=node)]
            else:
                placements = {**info(value).placements, "dp": REPLICATE}
                made = self.whole_count(normalizer, value, placements)
        if is_quotient:
            self.rewriter.replace(node, made[0])
            return made
        node.replace_input_with(value, made[-1])
        self.rewriter.refake(node)
        return [*made, node]

    def whole_count(self, normalizer: Node, value: Node, placements: Placements) -> list[Node]:
        """Return the global value of a sum, as a number of the sum's own type."""
        call = partial(self.rewriter.call, like=value, placements=placements)
        made = [call(aten.reciprocal.default, normalizer)]
        if not val(value).is_floating_point():
            made.append(call(aten.round.default, made[-1]))
            made.append(call(aten._to_copy.default, made[-1], dtype=val(value).dtype))
        return made

    def normalizer(self, dtype: torch.dtype) -> Node:
        """Append a NORMALIZER input to the forward graph."""
        name = str(len(self.program.forward.named(NORMALIZER)))
        with self.rewriter.fake_mode():
            value = torch.empty((), dtype=dtype)
        return self.rewriter.placeholder(Port(NORMALIZER, name), value)

    def foreign(self, value: Node) -> list[Node]:
        """Return the inputs behind a value that are neither leaves of the batch nor constants."""
        leaves = {node for _, node in self.sources()}
        return [n for n in ancestors([value], leaves) if n.op == "placeholder"]

    def require_batch_only(self, value: Node, loss: Node) -> None:
        """Refuse targets that are computed from more than the batch."""
        found = self.foreign(value)
        if found:
            raise PassError(
                f"the targets of '{loss.target}' ({info(loss).source}) are computed from"
                f" '{found[0].name}', so its valid tokens can't be counted before the step",
                help="give the targets in the batch",
            )

    def require_known(self, weight: Node, loss: Node) -> None:
        """Refuse class weights that are a part of the model: the prelude reads no parameters."""
        if self.foreign(weight):
            raise PassError(
                f"the mean of '{loss.target}' with class weights of the model can't be made global"
                f" ({info(loss).source})",
                help="give the weights as a constant of the loss function or in the batch",
            )

    def sources(self) -> list[tuple[Port, Node]]:
        """Return the inputs that the prelude may read: the batch, and constants."""
        constants = self.program.constants
        return [
            (port, node)
            for port, node in _ports(self.program.forward)
            if port.kind == BATCH or (port.kind == BUFFER and port.name in constants)
        ]

    def write_prelude(self) -> None:
        """Write the program's prelude: batch leaves of one micro-batch -> counts."""
        if not self.made:
            return
        forward = self.program.forward
        names = {node: port.name for port, node in _ports(forward) if port.kind == NORMALIZER}
        outputs = [(Port(COUNT, names[n]), count) for count, n in self.made.values()]
        counts = [count for _, count in outputs]
        leaves = self.sources()
        needed = ancestors(counts, {node for _, node in leaves})
        body = [node for node in forward.graph.nodes if node in needed]
        self.program.prelude = extract(leaves, body, outputs)
        self.rewriter.sweep()


def _ports(function: GraphFunction) -> list[tuple[Port, Node]]:
    return list(zip(function.inputs, function.placeholders, strict=True))
