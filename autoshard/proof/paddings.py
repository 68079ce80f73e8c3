"""Follow the padding of heads through the lowered graphs, so that erasure can leave it out.

Erasing padding is right where operators work on it side by side with the model's own part, which
the check of types has shown by the placements, where all that is summed up is zero in the padding,
and where every gradient of a padded parameter is zero there, so that it stays so. The last two are
shown here, operator by operator; what can't be shown is unproven.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch.fx import Node

from autoshard.ir.graph_function import FLAT_GRAD, GRAD, GraphFunction
from autoshard.ir.infer import is_zero
from autoshard.ir.node_info import info, origin, val
from autoshard.ir.padding import ROLE, Padding, makes_zeros
from autoshard.ir.params import ParamSpec
from autoshard.ir.placement import Replicate, Shard
from autoshard.ir.program import Program
from autoshard.ir.rules.call import bound_arguments, shapes_of, tensor_inputs
from autoshard.ops import collectives

aten = torch.ops.aten
Held = Padding | tuple[Padding | None, ...] | None
# What a whole value with padding may go through before it is split, or after it is gathered.
GATHERS = (collectives.all_gather, collectives.all_gather_start)
CARRYING = (
    *GATHERS,
    collectives.copy_to,
    collectives.shard,
    collectives.wait,
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
)


@dataclass
class Paddings:
    """The padding of every value that has one; ``placed`` are placements along tp."""

    program: Program
    placed: Mapping[Node, object]
    env: dict[Node, Held] = field(default_factory=dict)
    unproven: list[str] = field(default_factory=list)

    @property
    def is_needed(self) -> bool:
        """Tell whether any parameter has padding that graphs compute with."""
        return any(spec.is_widened for spec in self.program.params)

    def of(self, node: Node) -> Padding | None:
        """Return the padding of a node's one value."""
        held = self.env.get(node)
        return None if isinstance(held, tuple) else held

    def read(self, node: Node, spec: ParamSpec | None) -> None:
        """Follow one call; ``spec`` is the parameter that it reads out of a bucket, if it does."""
        if spec is not None:
            self.env[node] = padding_of(spec)
        elif node.target is operator.getitem:
            held = self.env.get(node.args[0])
            self.env[node] = self._item(node, held) if isinstance(held, tuple) else held
        elif node.target is aten.constant_pad_nd.default:
            self.env[node] = self._padded(node)
        elif any(self.env.get(n) for n in node.all_input_nodes) and node.target not in (
            collectives.pack,
            collectives.release,
        ):
            self.env[node] = self._computed(node)

    def cuts(self, node: Node) -> bool:
        """Tell whether a padding or its transpose adds or takes away what is no head's."""
        return self.of(node) is not None or self.of(node.args[0]) is not None

    def check_gradients(self, function: GraphFunction) -> None:
        """Note each gradient whose padding is not known as zero."""
        for name, node in self._gradients(function):
            want, have = padding_of(self.program.params[name]), self.of(node)
            is_kept = want is None or (have is not None and have.is_zero and have == want)
            if not is_kept and not is_zero(node):
                self.unproven.append(
                    f"the gradient of '{name}' is not shown to be zero in its padding, by"
                    f" {node.target} in {origin(node)}"
                )

    def _gradients(self, function: GraphFunction) -> Iterator[tuple[str, Node]]:
        buckets = {bucket.name: bucket for bucket in self.program.buckets}
        for port, node in zip(function.outputs, function.results, strict=True):
            if node is None or port.kind not in (GRAD, FLAT_GRAD):
                continue
            if port.kind == GRAD:
                yield port.name, node
                continue
            while node.target is not collectives.pack and node.all_input_nodes:
                node = node.all_input_nodes[0]
            if node.target is collectives.pack:
                yield from zip(buckets[port.name].fqns, node.args[0], strict=True)

    def _item(self, node: Node, held: tuple[Padding | None, ...]) -> Padding | None:
        source, index = node.args
        tensors = [i for i, v in enumerate(val(source)) if isinstance(v, torch.Tensor)]
        return held[tensors.index(index)]

    def _padded(self, node: Node) -> Padding | None:
        """Return what a pass has padded behind a value of each head; its transpose takes it off."""
        (x,) = tensor_inputs(node)
        before, after = shapes_of(x)[0], shapes_of(node)[0]
        pairs = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
        given = bound_arguments(node)
        is_ours = info(node).role == ROLE and len(pairs) == 1 and not given["value"]
        if not is_ours or any(given["pad"][::2]) or pairs[0][1] < pairs[0][0]:
            return None
        return Padding(Fraction(pairs[0][1], pairs[0][0]), True)

    def _computed(self, node: Node) -> Held:
        """Return the padding of what a call computes; where none is left, that it added nothing."""
        inputs = tensor_inputs(node)
        given = tuple(map(self.of, inputs))
        ratios = {padding.ratio for padding in given if padding}
        if len(ratios) != 1:
            self._note(node, "reads values that are padded differently")
            return None
        (ratio,) = ratios
        placements = self.placed.get(node)
        several = placements if isinstance(placements, tuple) else (placements,)
        found = tuple(
            self._made(node, given, placement, Padding(ratio, makes_zeros(node, given, place)))
            for place, placement in enumerate(several)
        )
        return found if isinstance(placements, tuple) else found[0]

    def _made(
        self, node: Node, given: tuple[Padding | None, ...], placement: object, padding: Padding
    ) -> Padding | None:
        """Return an output's padding; one that has none must have added nothing."""
        whole = all(
            isinstance(self.placed.get(n), Replicate) or node.target in GATHERS
            for n, p in zip(tensor_inputs(node), given, strict=True)
            if p
        )
        if isinstance(placement, Shard) or (whole and node.target in CARRYING):
            return padding
        if not padding.is_zero:
            self._note(node, "sums up padding that is not shown to be zero")
        return None

    def _note(self, node: Node, what: str) -> None:
        self.unproven.append(f"{node.target} in {origin(node)}: {what}")


def padding_of(spec: ParamSpec) -> Padding | None:
    """Return the padding that graphs compute with in a parameter: zeros."""
    if not spec.is_widened or spec.padded is None:
        return None
    dim = spec.padded_dim
    return Padding(Fraction(spec.padded[dim], spec.shape[dim]), True)
