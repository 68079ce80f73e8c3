"""Insert the collectives that the placements ask for; each is one node that names its dim and axis.

The conversions and their transposes are Megatron-LM's f and g and their relatives (see
``autoshard/ops/collectives.py``). Every (value, target) is converted once, whoever reads it: q, k
and v share one ``copy_to``, hence one all_reduce in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from autoshard.compiler.pass_base import Numerics, Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.diagnostics import InternalError
from autoshard.ir.node_info import info, val
from autoshard.ir.placement import REPLICATE, Partial, Placement, Replicate, Shard
from autoshard.ir.program import Level, Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ir.rules.call import Choice, call_of, tensor_inputs
from autoshard.ir.rules.factors import is_padded
from autoshard.ir.rules.table import choose
from autoshard.ops import collectives
from autoshard.passes._placing import Reader, needs_grad, reader_of

aten = torch.ops.aten
COLLECTIVES = (
    collectives.from_copies,
    collectives.copy_to,
    collectives.all_reduce,
    collectives.all_gather,
    collectives.reduce_scatter,
    collectives.shard,
)


@register
@dataclass(frozen=True)
class InsertCollectives(Pass):
    """Convert every input to the placement that its reader's rule wants.

    rewrite: ``add(y P, x R)`` --> ``all_reduce(y)``, then ``add(_, x)``;
    ``linear(x R, w S(0))`` --> ``linear(copy_to(x), w)``
    Until localize-shapes shapes stay global: a collective changes the placement alone.
    """

    name = "insert-collectives"
    group = "tensor"
    level = Level.FORWARD
    assumes = frozenset({"params_placed"})
    establishes = frozenset({"placed"})
    numerics = Numerics.REASSOCIATES

    axis: str = "tp"  # the mesh axis that weights are split over

    def run(self, program: Program, ctx: PassContext) -> None:
        """Walk the forward graph once in program order."""
        if program.mesh.size(self.axis) > 1:
            reader = reader_of(program, ctx.resolved, self.axis)
            _Insertion(program, ctx, reader).run()


class _Insertion:
    def __init__(self, program: Program, ctx: PassContext, reader: Reader) -> None:
        self.program, self.ctx, self.reader = program, ctx, reader
        self.rewriter = Rewriter(program.forward, InsertCollectives.name)
        self.grad = needs_grad(program)
        self.made: dict[tuple[Node, str], Node] = {}

    def run(self) -> None:
        for node in tuple(self.program.forward.graph.nodes):
            if node.op == "call_function" and tensor_inputs(node):
                self.convert_inputs(node)
            elif node.op == "output":
                self.convert_outputs(node)
        for node in self.made.values():
            if node.target is collectives.all_gather:
                self.reduce_gradient(node)
        self.rewriter.sweep()

    def convert_inputs(self, node: Node) -> None:
        """Give one call what its rule wants."""
        if isinstance(val(tensor_inputs(node)[0]), (tuple, list)):
            return
        if node.target in COLLECTIVES:
            return
        choice = self.reader.choice(node)
        split = any(not isinstance(out, Replicate) for out in choice.outs)
        inputs = tensor_inputs(node)
        wanted = []
        for value, want in zip(inputs, choice.wants, strict=True):
            made = self.convert(value, want, node)
            is_copied = split and want == REPLICATE and made in self.grad
            wanted.append(self.copy(made, node) if is_copied else made)
        if wanted != list(inputs):
            substitute(node, wanted)
            self.rewriter.annotate(node)

    def convert_outputs(self, node: Node) -> None:
        """Give the program's outputs whole."""
        results = self.program.forward.results
        whole = [r if r is None else self.convert(r, REPLICATE, node) for r in results]
        self.program.forward.set_outputs(whole, self.program.forward.outputs)

    def convert(self, value: Node, want: Placement, reader: Node) -> Node:
        """Return ``value`` placed as ``want``, made once before its first reader."""
        have = self.reader.held(value)
        if have == want:
            return value
        return self.once(value, str(want), reader, lambda: self.steps(value, have, want, reader))

    def copy(self, value: Node, reader: Node) -> Node:
        """Return a replicated value for split readers: their gradients are summed over ranks."""
        if value.target is collectives.copy_to or _sums_gradients(value):
            return value
        make = partial(self.call, collectives.copy_to, value, REPLICATE, reader)
        return self.once(value, "copy", reader, make)

    def once(self, value: Node, key: str, reader: Node, make: Callable[[], Node]) -> Node:
        """Return what was made of ``value`` before, or make it right before ``reader``."""
        if (value, key) not in self.made:
            with self.rewriter.before(reader):
                made = make()
            self.made[value, key] = made
            if value in self.grad:
                self.grad.add(made)
        return self.made[value, key]

    def steps(self, value: Node, have: Placement, want: Placement, reader: Node) -> Node:
        """Return the conversion, through the whole value where there is no direct one."""
        if isinstance(want, Partial):
            raise InternalError(f"nothing makes {have} partial: '{value.name}'")
        if isinstance(have, Shard) and isinstance(want, Shard):
            return self.convert(self.convert(value, REPLICATE, reader), want, reader)
        if isinstance(have, Partial):
            if isinstance(want, Shard):
                return self.cut(collectives.reduce_scatter, value, want, value)
            shard = self.reader.token_shard(value) if len(value.users) > 1 else None
            if shard is not None:
                return self.convert(self.convert(value, shard, reader), REPLICATE, reader)
            return self.call(collectives.all_reduce, value, REPLICATE, value)
        if isinstance(want, Shard):
            twin = self.twin(value, want, reader)
            return twin or self.cut(collectives.shard, value, want, reader)
        return self.gather(value, have, reader)

    def cut(self, op: Callable, value: Node, want: Shard, like: Node) -> Node:
        """Return this rank's part of a whole or partial value."""
        return self.call(op, value, want, like, want.dim, list(want.blocks))

    def gather(self, value: Node, have: Shard, like: Node) -> Node:
        """Return the whole value; what padding comes along is cut off."""
        dim, extent = have.dim, val(value).shape[have.dim]
        gathered = self.call(collectives.all_gather, value, REPLICATE, like, dim, list(have.blocks))
        if not is_padded(have.blocks, extent):
            return gathered
        return self.rewriter.call(aten.slice.Tensor, gathered, dim, 0, extent, like=gathered)

    def reduce_gradient(self, gathered: Node) -> None:
        """Let a gather that only split readers read scatter the sum of their gradients itself.

        The copies in between would sum them into a whole gradient of which each rank needs a part.
        """
        copies = list(gathered.users)
        if copies and all(copy.target is collectives.copy_to for copy in copies):
            gathered.args = (*gathered.args[:5], True)
            for copy in copies:
                self.rewriter.replace(copy, gathered)

    def twin(self, value: Node, want: Shard, reader: Node) -> Node | None:
        """Return a value made in its local size where it is constant along the split dimension.

        An expanded mask, or a constant, need not be made whole to be cut; nor need a key that all
        heads share, expanded and then transposed.
        """
        if value.op != "call_function" or want.blocks:
            return None
        inputs = tensor_inputs(value)
        if want.dim not in self.reader.choice(value).uniform:
            source = self.twin_source(value, want, reader) if len(inputs) == 1 else None
        elif inputs and inputs[0] in self.grad and self.reader.held(inputs[0]) == REPLICATE:
            source = self.copy(inputs[0], reader)
        else:
            source = inputs[0] if inputs else value
        if source is None:
            return None
        args = (source, *value.args[1:]) if inputs else value.args
        placements = {**info(value).placements, self.reader.axis: want}
        return self.rewriter.call(
            value.target, *args, like=value, placements=placements, **value.kwargs
        )

    def twin_source(self, value: Node, want: Shard, reader: Node) -> Node | None:
        """Return the twin of the one value that ``value`` is made of, None if it has none."""
        (source,), call = tensor_inputs(value), call_of(value, self.reader.size)
        if isinstance(val(source), (tuple, list)):
            return None
        for dim in range(val(source).dim()):
            shard = Shard(dim)
            if choose(call, (shard,)) == Choice((shard,), (want,)):
                return self.twin(source, shard, reader)
        return None

    def call(
        self, op: Callable, value: Node, placement: Placement, like: Node, *args: object
    ) -> Node:
        """Make one collective; its shape stays the global one."""
        sized = (self.reader.size,) if args else ()
        placements = {**info(value).placements, self.reader.axis: placement}
        made = self.rewriter.call(
            op, value, *args, self.reader.axis, *sized, like=like, placements=placements
        )
        made.meta["val"] = val(value)
        self.ctx.applied(made, f"{self.reader.held(value)} -> {placement}: {op}")
        return made


def _sums_gradients(value: Node) -> bool:
    """Tell whether a gather's transpose is a reduce_scatter."""
    return value.target is collectives.all_gather and value.args[5:] == (True,)


def substitute(node: Node, inputs: list[Node]) -> None:
    """Give ``node`` other tensor inputs, in the order of ``tensor_inputs``."""
    following = iter(inputs)
    node.args = map_arg(node.args, lambda _: next(following))
    order = [a.name for a in node.target._schema.arguments if a.name in node.kwargs]
    node.kwargs = {name: map_arg(node.kwargs[name], lambda _: next(following)) for name in order}
