"""Turn the typed graph of global shapes into the graph that one rank runs.

Arguments that are sizes (of a reshape, an expand, a constant, a split) are rewritten to this rank's
share, and every shape is computed again from the local parameters. The result is checked against
what the placements say; a mismatch is our bug, never the user's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from autoshard.compiler.pass_base import Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.diagnostics import InternalError
from autoshard.ir.graph_function import PARAM
from autoshard.ir.invariants_forward import is_localized
from autoshard.ir.node_info import info, val
from autoshard.ir.placement import Placement, Shard
from autoshard.ir.program import Level, Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ir.rules.call import Shape, shapes_of, tensor_inputs
from autoshard.ops.bias_dropout_add_layer_norm import bias_dropout_add_layer_norm, sharded
from autoshard.ops.collectives import all_gather
from autoshard.ops.dropout import DropoutArgs, dropout

aten = torch.ops.aten


@register
@dataclass(frozen=True)
class LocalizeShapes(Pass):
    """Give every node its local shape.

    rewrite: ``reshape(x S(2), [2, 16, 8, 4])`` --> ``reshape(x, [2, 16, 4, 4])`` on two ranks
    assumes ``placed``; keeps it.
    """

    name = "localize-shapes"
    group = "tensor"
    level = Level.FORWARD
    assumes = frozenset({"placed"})

    axis: str = "tp"  # the mesh axis that weights are split over

    def run(self, program: Program, ctx: PassContext) -> None:
        """Walk the forward graph once; a graph that is local already is left alone."""
        size = program.mesh.size(self.axis)
        if size > 1 and not is_localized(program, self.axis):
            _Localization(program, self.axis, size).run()


class _Localization:
    def __init__(self, program: Program, axis: str, size: int) -> None:
        self.program, self.axis, self.size = program, axis, size
        self.rewriter = Rewriter(program.forward, LocalizeShapes.name)
        self.whole: dict[Node, Shape] = {}

    def run(self) -> None:
        for node in self.program.forward.graph.nodes:
            if node.op != "output":
                self.whole[node] = shapes_of(node)[0] if shapes_of(node) else ()
        for fqn, node in self.program.forward.named(PARAM).items():
            self.shrink(node, self.program.params[fqn].local_shape(self.program.mesh))
        changed = set(self.program.forward.named(PARAM).values())
        for node in self.program.forward.graph.nodes:
            if node.op == "call_function" and self.is_touched(node, changed):
                changed.add(node)
                self.localize(node)
        self.normalize()

    def is_touched(self, node: Node, changed: set[Node]) -> bool:
        is_split = isinstance(info(node).placement(self.axis), Shard)
        return is_split or any(n in changed for n in node.all_input_nodes)

    def shrink(self, node: Node, shape: Shape) -> None:
        """Give a placeholder its local shape."""
        if tuple(val(node).shape) != shape:
            with val(node).fake_mode:
                node.meta["val"] = val(node).new_empty(shape)

    def localize(self, node: Node) -> None:
        """Rewrite the sizes among a call's arguments and compute its shape again."""
        before = shapes_of(node)
        rewrite = SIZES.get(node.target)
        args = rewrite(self, node) if rewrite else node.args
        if args != node.args:
            self.rewriter.set_args(node, *args)
        else:
            self.rewriter.refake(node)
        placement = info(node).placement(self.axis)
        if node.target is all_gather and node.args[2]:
            return  # padding comes along; a slice behind cuts it off
        for whole, local in zip(before[:1], shapes_of(node)[:1], strict=True):
            if self.share(whole, placement) != local:
                raise InternalError(
                    f"'{node.name}' {list(whole)} placed {placement} came out as {list(local)}"
                )

    def share(self, shape: Shape, placement: Placement) -> Shape:
        """Return one rank's part of a whole shape; a padded dimension counts its padding."""
        if not isinstance(placement, Shard):
            return shape
        local = list(shape)
        extent = sum(placement.blocks) or shape[placement.dim]
        local[placement.dim] = extent // self.size
        return tuple(local)

    def normalize(self) -> None:
        """Forget paddings: from here on the padded shape is the whole one."""
        for node in self.program.forward.graph.nodes:
            placement = info(node).placement(self.axis)
            if not isinstance(placement, Shard) or len(placement.blocks) != 1:
                continue
            placements = {**info(node).placements, self.axis: replace(placement, blocks=())}
            self.rewriter.annotate(node, placements=placements)

    def local_out(self, node: Node) -> list[int]:
        """Return the local shape that a call's output must have."""
        return list(self.share(self.whole[node], info(node).placement(self.axis)))

    def split_along(self, node: Node, dim: int) -> bool:
        """Tell whether a call's first input is split along ``dim``."""
        placement = info(tensor_inputs(node)[0]).placement(self.axis)
        return isinstance(placement, Shard) and placement.dim == dim


Rewrite = Callable[[_Localization, Node], tuple]


def _shape_second(pass_: _Localization, node: Node) -> tuple:
    return (node.args[0], pass_.local_out(node), *node.args[2:])


def _shape_first(pass_: _Localization, node: Node) -> tuple:
    return (pass_.local_out(node), *node.args[1:])


def _repeat(pass_: _Localization, node: Node) -> tuple:
    x = node.args[0]
    out, shape = pass_.local_out(node), shapes_of(x)[0]
    shape = (1,) * (len(out) - len(shape)) + shape
    return (x, [n // max(extent, 1) for n, extent in zip(out, shape, strict=True)])


def _split(pass_: _Localization, node: Node) -> tuple:
    x, sizes, *rest = node.args
    dim = (rest[0] if rest else 0) % len(pass_.whole[x])
    if not pass_.split_along(node, dim):
        return node.args
    cut = sizes // pass_.size if isinstance(sizes, int) else [s // pass_.size for s in sizes]
    return (x, cut, *rest)


def _slice(pass_: _Localization, node: Node) -> tuple:
    x, dim, start, end, *rest = (*node.args, 0, None, None)[:4] + node.args[4:]
    extent = pass_.whole[x][dim]
    if not pass_.split_along(node, dim % len(pass_.whole[x])):
        return node.args
    start, end, _ = slice(start, end).indices(extent)
    return (x, dim, start // pass_.size, end // pass_.size, *rest)


def _narrow(pass_: _Localization, node: Node) -> tuple:
    x, dim, start, length = node.args
    if not pass_.split_along(node, dim % len(pass_.whole[x])):
        return node.args
    return (x, dim, start // pass_.size, length // pass_.size)


def _dropout(pass_: _Localization, node: Node) -> tuple:
    placement = info(node).placement(pass_.axis)
    if not isinstance(placement, Shard):
        return node.args
    args = DropoutArgs(*node.args)
    return tuple(args.sharded(placement.dim, placement.blocks, pass_.axis, pass_.size))


def _fused_dropout(pass_: _Localization, node: Node) -> tuple:
    placement = info(node.args[0]).placement(pass_.axis)
    if not isinstance(placement, Shard):
        return node.args
    return sharded(node.args, placement.dim, placement.blocks, pass_.axis, pass_.size)


# The operators whose arguments are sizes. Dimensions that are reduced, normalised or indexed are
# whole, so sizes that speak of those never change.
SIZES: dict[object, Rewrite] = {
    aten.reshape.default: _shape_second,
    aten.view.default: _shape_second,
    aten.expand.default: _shape_second,
    aten.new_ones.default: _shape_second,
    aten.new_zeros.default: _shape_second,
    aten.new_full.default: _shape_second,
    aten.new_empty.default: _shape_second,
    aten.full.default: _shape_first,
    aten.zeros.default: _shape_first,
    aten.ones.default: _shape_first,
    aten.repeat.default: _repeat,
    aten.tile.default: _repeat,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.slice.Tensor: _slice,
    aten.narrow.default: _narrow,
    dropout: _dropout,
    bias_dropout_add_layer_norm: _fused_dropout,
}
