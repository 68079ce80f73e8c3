"""How values lie over the batch axis: data parallel ranks and micro-batches alike.

The graph's shapes are those of one micro-batch of one rank, so nothing is converted here: a value
that a rule wants split must be split already, or be the same along that dimension (a mask expanded
over the batch), or it mixes samples.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch.fx import Node

from autoshard.diagnostics import PassError
from autoshard.ir.constants import Constants
from autoshard.ir.node_info import info, val
from autoshard.ir.placement import REPLICATE, Partial, Placement, Replicate, Shard
from autoshard.ir.rewrite import Rewriter
from autoshard.ir.rules.call import Choice, call_of, shapes_of, tensor_inputs
from autoshard.ir.rules.table import choose

AXIS = "dp"


class BatchAxis:
    """The placements of a forward graph's values over dp, found in program order."""

    def __init__(self, rewriter: Rewriter, terms: int) -> None:
        """Look at ``terms`` micro-batches, all ranks together; a single one may mix samples."""
        self.rewriter = rewriter
        self.terms = terms
        self.samples = 1  # of one micro-batch
        self._outs: dict[Node, tuple[Placement, ...]] = {}
        self._uniform: dict[Node, frozenset[int]] = {}  # dims along which a value is constant

    def held(self, node: Node) -> Placement:
        """Return how a value lies."""
        return self._outs.get(node, (REPLICATE,))[0]

    def record(self, node: Node, placement: Placement) -> None:
        """Set how a placeholder lies."""
        if isinstance(placement, Shard):
            self.samples = val(node).shape[0]
        self._set(node, (placement,))

    def visit(self, node: Node) -> None:
        """Ask the rule of a call and record its outputs; refuse what mixes samples."""
        if node.target is operator.getitem:
            values = self._outs[node.args[0]]
            self._set(node, (_item(node, values),))
            return
        inputs = tensor_inputs(node)
        ins = tuple(map(self.held, inputs))
        if all(isinstance(p, Replicate) for p in ins):
            self._visit_constant(node, inputs)
            return
        choice = self._choice(node, ins)
        if choice.wants != ins and self.terms > 1:
            self._convert(node, inputs, ins, choice)
        self._set(node, choice.outs)

    def _choice(self, node: Node, ins: tuple[Placement, ...]) -> Choice:
        return choose(call_of(node, 1, axis=AXIS), ins)

    def _visit_constant(self, node: Node, inputs: tuple[Node, ...]) -> None:
        """Record a value that no sample enters, and the dims along which it is constant.

        A value is constant along a dim when its rule, given inputs split along dims where *they*
        are constant, would split it there.
        """
        whole = (REPLICATE,) * len(shapes_of(node))
        self._set(node, whole)
        found = set(self._choice(node, (REPLICATE,) * len(inputs)).uniform)
        for i, source in enumerate(inputs):
            for dim in self._uniform_dims(source):
                ins = tuple(Shard(dim) if j == i else REPLICATE for j in range(len(inputs)))
                choice = self._choice(node, ins)
                out = choice.outs[0] if choice.outs else REPLICATE
                if isinstance(out, Shard) and self._can_split(inputs, choice.wants):
                    found.add(out.dim)
        self._uniform[node] = frozenset(found)

    def _convert(
        self, node: Node, inputs: tuple[Node, ...], ins: tuple[Placement, ...], choice: Choice
    ) -> None:
        """Refuse a call whose operands can't lie as its rule wants."""
        if not choice.proven:
            refuse_mixing(node, "it has no placement rule, so samples may be mixed")
        for source, have, want in zip(inputs, ins, choice.wants, strict=True):
            if have == want or (isinstance(have, Replicate) and self._can_split([source], [want])):
                continue
            if isinstance(have, Partial):
                refuse_mixing(node, "it is not linear in a sum over the batch")
            refuse_mixing(node, "it mixes the samples of a micro-batch")

    def _can_split(self, sources: Sequence[Node], wants: Sequence[Placement]) -> bool:
        """Tell whether every source may be read as split: it is the same for every sample."""
        return all(
            not isinstance(want, Shard)
            or want.dim in self._uniform_dims(source)
            or Constants(self.samples).is_uniform(source, want)
            for source, want in zip(sources, wants, strict=True)
        )

    def _uniform_dims(self, node: Node) -> frozenset[int]:
        """Return the dims along which a batch-independent value is constant, size 1 included."""
        if not isinstance(self.held(node), Replicate) or node.op == "placeholder":
            return frozenset()
        shape = val(node).shape if isinstance(val(node), torch.Tensor) else ()
        single = {dim for dim, extent in enumerate(shape) if extent == 1}
        return self._uniform.get(node, frozenset()) | single

    def _set(self, node: Node, outs: tuple[Placement, ...]) -> None:
        self._outs[node] = outs
        if outs and outs[0] != info(node).placement(AXIS):
            self.rewriter.annotate(node, placements={**info(node).placements, AXIS: outs[0]})


def refuse_mixing(node: Node, why: str) -> NoReturn:
    """Raise the error for a value that has no global form."""
    record = info(node)
    name = getattr(node.target, "__name__", str(node.target))
    place = record.source or f"module '{record.path}'"
    raise PassError(
        f"the loss can't be made global: '{name}' at {place}: {why}",
        code="AS712",
        help=(
            "a loss must be a sum or mean of terms of one sample each "
            "(or train with dp = 1 and num_microbatches = 1)"
        ),
    )


def _item(node: Node, values: tuple[Placement, ...]) -> Placement:
    source, index = node.args
    tensors = [i for i, v in enumerate(val(source)) if isinstance(v, torch.Tensor)]
    return values[tensors.index(index)]
