"""Let each tensor-parallel rank send its part of a value that all of them hold.

Megatron-LM's scatter-gather of pipeline messages. The sender cuts, the receiver gathers over the
fast links inside a node; the gradient goes back the same way, because that is how the two
collectives are differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch.fx import Node

from autoshard.compiler.pass_base import PassContext
from autoshard.ir.graph_function import BOUNDARY, GraphFunction, Port
from autoshard.ir.node_info import info, val
from autoshard.ir.placement import Placement, Placements, Replicate, Shard
from autoshard.ir.program import Program, Stage
from autoshard.ir.rewrite import Rewriter
from autoshard.ops.collectives import all_gather, shard
from autoshard.source import Span
from autoshard.units import show_bytes

AXIS = "tp"
PAYS_BYTES = 1 << 20  # below, one more collective costs more than the bytes it saves


class BoundaryScatter:
    """Rewrites both sides of stage boundaries as the plan's `scatter_boundary` says."""

    def __init__(
        self,
        program: Program,
        ranks: Sequence[int],
        choice: str,
        span: Span | None,
        pass_name: str,
    ) -> None:
        """Take the plan's word, `auto`, `on` or `off`, its place, and the rank of every stage."""
        self._size, self._ranks = program.mesh.size(AXIS), ranks
        self._choice, self._span, self._pass = choice, span, pass_name

    def run(self, stages: Sequence[Stage], ctx: PassContext) -> None:
        """Scatter what should be, boundary by boundary."""
        if self._size == 1 or self._choice == "off":
            return
        for left, right in pairwise(stages):
            if self._ranks[left.index] == self._ranks[right.index]:
                continue  # handed over in memory
            for name, value in left.forward.named_results(BOUNDARY).items():
                self._consider(left, right, name, value, ctx)

    def _consider(
        self, left: Stage, right: Stage, name: str, value: Node, ctx: PassContext
    ) -> None:
        fake, place = val(value), info(value).placement(AXIS)
        where = f"`{name}` to stage {right.index}"
        nbytes = fake.numel() * fake.element_size()
        dims = [d for d, extent in enumerate(fake.shape) if extent and extent % self._size == 0]
        if not fake.is_floating_point() or not isinstance(place, Replicate):
            return
        if self._choice == "auto" and nbytes < PAYS_BYTES:
            ctx.missed(where, f"{show_bytes(nbytes)} sent whole: below {show_bytes(PAYS_BYTES)}")
        elif not dims:
            ctx.missed(where, f"no dimension of {list(fake.shape)} divides by {AXIS} {self._size}")
        else:
            self._cut(left.forward, name, value, dims[0])
            self._gather(right.forward, name, dims[0])
            part = show_bytes(nbytes // self._size)
            ctx.applied(where, f"sent as {part} from each rank instead of {show_bytes(nbytes)}")

    def _cut(self, function: GraphFunction, name: str, value: Node, dim: int) -> None:
        rewriter = Rewriter(function, self._pass)
        if value.target is all_gather and value.args[0] is function.node(BOUNDARY, name):
            part = value.args[0]  # relayed as it came
        else:
            with rewriter.before(function.output_node):
                part = self._call(rewriter, shard, value, dim, Shard(dim))
        port = Port(BOUNDARY, name)
        pairs = zip(function.outputs, function.results, strict=True)
        function.set_outputs([part if p == port else n for p, n in pairs], function.outputs)
        if not value.users:
            function.graph.erase_node(value)

    def _gather(self, function: GraphFunction, name: str, dim: int) -> None:
        rewriter = Rewriter(function, self._pass)
        arrived = function.node(BOUNDARY, name)
        whole_place = info(arrived).placement(AXIS)
        shape = list(val(arrived).shape)
        shape[dim] //= self._size
        arrived.meta["val"] = val(arrived).new_empty(shape)
        rewriter.annotate(arrived, placements=_on(arrived, Shard(dim)), span=self._span)
        users = list(arrived.users)
        with rewriter.after(arrived):
            whole = self._call(rewriter, all_gather, arrived, dim, whole_place)
        for user in users:
            user.replace_input_with(arrived, whole)

    def _call(
        self, rewriter: Rewriter, op: object, value: Node, dim: int, placement: Placement
    ) -> Node:
        args, places = (value, dim, [], AXIS, self._size), _on(value, placement)
        return rewriter.call(op, *args, like=value, placements=places, span=self._span)


def _on(node: Node, placement: Placement) -> Placements:
    return info(node).on(AXIS, placement).placements
