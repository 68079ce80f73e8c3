"""Padded heads: the graph is rewritten as if the model had so many more, which are all zero.

A head beyond the model's own has zero rows in its query, key and value layers, so its output is
zero; and zero columns in the layer that reads it, so no gradient comes back. The rows and columns
stay zero whatever is trained, and every rank runs the same program. So that this holds, each
operator in between must work on each head by itself (its rule tells), and what is summed up must be
zero in the padding on both sides: a padded sigmoid is not, and is refused.

Megatron-LM pads its vocabulary so; that heads are padded too is an idea of serving systems.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd, prod

import torch
from torch.fx import Node

from autoshard.diagnostics import Label, PlacementError
from autoshard.dsl.resolve import ResolvedRule
from autoshard.ir.graph_function import PARAM
from autoshard.ir.node_info import info, val
from autoshard.ir.padding import PRODUCTS, ROLE, Padding, has_slope, makes_zeros
from autoshard.ir.params import ParamSpec
from autoshard.ir.placement import PARTIAL, REPLICATE, Placement, Shard, normalize
from autoshard.ir.program import Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ir.rules import factories
from autoshard.ir.rules.call import Shape, bound_arguments, call_of, shapes_of, tensor_inputs
from autoshard.ir.rules.reshape import reshape_shard
from autoshard.ir.rules.table import choose
from autoshard.ops.dropout import dropout

aten = torch.ops.aten
LAYERS = {aten.linear.default: 1, aten.addmm.default: 2, aten.mm.default: 1}  # place of the weight
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class Padded:
    """How a value is longer: along which dim and in which of the model's blocks, and by whom."""

    shard: Shard  # in the model's extents
    padding: Padding
    rule: ResolvedRule
    width: int  # of the smallest part of the weight that the rule pads

    @property
    def text(self) -> str:
        """Return by how much it is longer, as the plan's reader counts."""
        return f"{self.width} padded to {int(self.width * self.padding.ratio)}"


def compute_padding(
    program: Program, rewriter: Rewriter, rules: Mapping[str, ResolvedRule], axis: str
) -> None:
    """Carry the padding of widened parameters through the forward graph, or refuse by name.

    rewrite: ``linear(x, w f32[24, 32]) -> view(_, [2, 6, 3, 8])`` with 3 heads on 2 ranks -->
    ``linear(x, w f32[32, 32]) -> view(_, [2, 6, 4, 8])``
    """
    walk = _Walk(rewriter, program.mesh.size(axis))
    for fqn, node in program.forward.named(PARAM).items():
        if program.params[fqn].is_widened:
            walk.begin(node, program.params[fqn], rules[fqn])
    if not walk.held:
        return
    for node in tuple(program.forward.graph.nodes):
        if node.op == "call_function" and any(n in walk.held for n in node.all_input_nodes):
            walk.visit(node)
    shown = next((n for n in program.forward.results if n in walk.held), None)
    if shown is not None:
        raise walk.refusal(shown, walk.held[shown], "is given out by the model")


@dataclass
class _Walk:
    rewriter: Rewriter
    size: int
    held: dict[Node, Padded | tuple[Padded, ...]] = field(default_factory=dict)
    own: dict[Node, tuple[Shape, ...]] = field(default_factory=dict)  # shapes of the model
    made: dict[tuple[Node, int, Fraction], Node] = field(default_factory=dict)

    def begin(self, weight: Node, spec: ParamSpec, rule: ResolvedRule) -> None:
        """Give a parameter's placeholder its padded shape."""
        self.own[weight] = shapes_of(weight)
        with val(weight).fake_mode:
            weight.meta["val"] = val(weight).new_empty(spec.padded)
        dim = spec.padded_dim
        ratio = Fraction(spec.padded[dim], spec.shape[dim])
        shard = next(p for p in spec.placements.values() if isinstance(p, Shard))
        blocks = tuple(int(block / ratio) for block in shard.blocks)
        own = normalize(Shard(dim, blocks), spec.shape[dim])
        width = min(blocks, default=spec.shape[dim])
        self.held[weight] = Padded(own, Padding(ratio, True), rule, width)

    def visit(self, node: Node) -> None:
        """Compute one call with the padding of what it reads."""
        self.own[node] = shapes_of(node)
        if node.target is operator.getitem:
            self._take(node)
            return
        if node.target in factories.TABLE:
            return  # reads no values
        inputs = tensor_inputs(node)
        held = tuple(self.held.get(n) for n in inputs)
        source = self._agreed(node, held)
        if node.target is dropout:
            why = "would draw another mask than one rank draws, which counts the model's own heads"
            raise self.refusal(node, source, why)
        if node.target in VIEWS:
            outs: tuple[Placement, ...] = (self._view(node, source),)
        else:
            outs = self._choose(node, inputs, held, source)
        if PARTIAL in outs:
            return
        paddings = tuple(held and held.padding for held in map(self.held.get, tensor_inputs(node)))
        if not has_slope(node, paddings):
            raise self.refusal(node, source, "has no finite slope at zero, where it is padded")
        padding = Padding(source.padding.ratio, makes_zeros(node, paddings))
        found = tuple(Padded(shard, padding, source.rule, source.width) for shard in outs)
        self.held[node] = found if isinstance(val(node), (tuple, list)) else found[0]
        self._compute(node, outs, padding)

    def refusal(self, node: Node, held: Padded, why: str, help: str = "") -> PlacementError:
        """Return the error that a value with padding can't go on."""
        rule = held.rule
        where = info(node).source
        return PlacementError(
            f"`{rule.path}` can't be padded: '{node.target}' {why}",
            code="AS402",
            span=rule.rule.span,
            label=held.text,
            help=help or "choose ranks that divide, or leave the layers whole",
            notes=(f"its outputs go into {where}",) if where else (),
        )

    def _take(self, node: Node) -> None:
        source, index = node.args
        self.rewriter.refake(node)
        self.held[node] = self.held[source][index]

    def _agreed(self, node: Node, held: tuple[Padded | None, ...]) -> Padded:
        """Return one of a call's padded inputs; all must be padded in the same proportion."""
        first, *others = (each for each in held if each is not None)
        other = next((o for o in others if o.padding.ratio != first.padding.ratio), None)
        if other is None:
            return first
        less, more = sorted((first, other), key=lambda held: held.padding.ratio)
        where = info(node).source
        spans = more.rule.rule.span
        raise PlacementError(
            f"`{less.rule.path}` and `{more.rule.path}` are padded in different proportions",
            code="AS402",
            span=less.rule.rule.span,
            label=f"{less.text} here",
            secondary=[Label(spans, f"{more.text} here")] if spans else [],
            help=_same_proportion(less, more.padding.ratio, self.size),
            notes=(f"both go into {where}",) if where else (),
        )

    def _choose(
        self,
        node: Node,
        inputs: tuple[Node, ...],
        held: tuple[Padded | None, ...],
        source: Padded,
    ) -> tuple[Placement, ...]:
        """Return how outputs lie by the operator's rule, which reads the model's own shapes."""
        ins = tuple(REPLICATE if h is None else h.shard for h in held)
        choice = choose(call_of(node, 1, self._own_shapes), ins)
        kept = all(want == h.shard for want, h in zip(choice.wants, held, strict=True) if h)
        if not choice.proven or not kept:
            raise self._cannot(node, inputs, held, source)
        for given, padded, want in zip(inputs, held, choice.wants, strict=True):
            if padded is None and isinstance(want, Shard):
                self._pad(node, given, want, source)
        if PARTIAL in choice.outs:
            self._end(node, source)
        elif not all(isinstance(out, Shard) for out in choice.outs):
            raise self._cannot(node, inputs, held, source)
        return choice.outs

    def _cannot(
        self, node: Node, inputs: tuple[Node, ...], held: tuple[Padded | None, ...], source: Padded
    ) -> PlacementError:
        """Return the error of a call whose rule needs the padded dimension whole."""
        is_layer = node.target in LAYERS and held[LAYERS[node.target]] is None
        extent = self._own_shapes(inputs[held.index(source)])[0][source.shard.dim]
        longer = int(extent * source.padding.ratio)
        if is_layer:
            unit = _unit(extent, longer, self.size)
            help = f"give `{info(node).path}` the rule `rowwise(pad={unit})`"
            return self.refusal(node, source, f"reads {longer} and its weight has {extent}", help)
        return self.refusal(node, source, "does not work on each of its parts by itself")

    def _end(self, node: Node, source: Padded) -> None:
        """Check that a product which sums padding up adds nothing, forward or backward."""
        summed = [self.held.get(n) for n in tensor_inputs(node)[-2:]]
        if node.target is aten.linear.default:
            summed = [self.held.get(n) for n in node.args[:2]]
        if node.target not in (*PRODUCTS, *LAYERS) or None in summed:
            raise self.refusal(node, source, "sums its padding up")
        if not all(held.padding.is_zero for held in summed):
            raise self.refusal(node, source, "sums padding up that is not zero")
        self.rewriter.refake(node)
        self.rewriter.annotate(node)

    def _own_shapes(self, node: Node) -> tuple[Shape, ...]:
        return self.own.get(node) or shapes_of(node)

    def _view(self, node: Node, source: Padded) -> Shard:
        """Rewrite the sizes of a view; return where the padded dimension is then."""
        (x,), ratio = tensor_inputs(node), source.padding.ratio
        shard = _longer(source.shard, ratio)
        for dim, extent in enumerate(self.own[node][0]):
            sizes = list(self.own[node][0])
            if (extent * ratio).denominator != 1:
                continue
            sizes[dim] = int(extent * ratio)
            if prod(sizes) != val(x).numel():
                continue
            found = reshape_shard(shard, shapes_of(x)[0], tuple(sizes), self.size)
            if found is not None and found.dim == dim:
                node.args = (x, sizes, *node.args[2:])
                blocks = tuple(int(block / ratio) for block in found.blocks)
                return normalize(Shard(dim, blocks), extent)
        raise self._unlike_heads(node, source)

    def _unlike_heads(self, node: Node, source: Padded) -> PlacementError:
        """Return the error of a view that takes padding apart: it must be whole heads."""
        (x,) = tensor_inputs(node)
        before, after = self._own_shapes(x)[0], self.own[node][0]
        why = f"makes {list(after)} of {list(before)}, where it is no whole heads"
        return self.refusal(node, source, why, "`pad` must be whole heads (or groups) of outputs")

    def _pad(self, node: Node, value: Node, want: Shard, source: Padded) -> None:
        """Give a value that has a share for each head, such as ALiBi's, zeros for padded ones."""
        extent = shapes_of(value)[0][want.dim]
        block = want.blocks[0] if want.blocks else extent
        is_even = not want.blocks or set(want.blocks) == {block}
        if not is_even or not val(value).is_floating_point():
            raise self.refusal(node, source, f"reads {val(value).dtype} numbers of each head")
        ratio = source.padding.ratio
        key = value, want.dim, ratio
        if key not in self.made:
            with self.rewriter.before(node):
                self.made[key] = self._zeros_behind(value, want.dim, block, ratio)
        made = self.made[key]
        self.own[made] = shapes_of(value)
        self.held[made] = Padded(want, Padding(ratio, True), source.rule, source.width)
        node.replace_input_with(value, made)

    def _zeros_behind(self, value: Node, dim: int, block: int, ratio: Fraction) -> Node:
        shape, extra = list(shapes_of(value)[0]), int(block * ratio) - block
        make = self.rewriter.call
        apart = [*shape[:dim], shape[dim] // block, block, *shape[dim + 1 :]]
        is_apart = shape[dim] != block
        if is_apart:
            value = make(aten.reshape.default, value, apart, like=value, role=ROLE)
        behind = len(shape) - dim - 1
        margins = [0, 0] * behind + [0, extra]
        value = make(aten.constant_pad_nd.default, value, margins, 0, like=value, role=ROLE)
        if is_apart:
            shape[dim] = int(shape[dim] * ratio)
            value = make(aten.reshape.default, value, shape, like=value, role=ROLE)
        return value

    def _compute(self, node: Node, outs: tuple[Placement, ...], padding: Padding) -> None:
        """Compute a call's shapes again, after its literal sizes; they must come out longer."""
        wanted = [
            _lengthened(shape, out, padding.ratio)
            for shape, out in zip(self.own[node], outs, strict=True)
        ]
        rewrite = SIZES.get(node.target)
        if rewrite is not None:
            node.args = rewrite(node, wanted, padding.ratio, self.held)
        self.rewriter.refake(node)
        self.rewriter.annotate(node)
        if list(shapes_of(node)) != wanted:
            held = self.held[node]
            first = held[0] if isinstance(held, tuple) else held
            raise self.refusal(node, first, f"computes {list(shapes_of(node)[0])} of padded values")


def _same_proportion(held: Padded, ratio: Fraction, size: int) -> str:
    """Return what a rule must say so that its weight is ``ratio`` times as long."""
    longer = held.width * ratio
    if longer.denominator != 1:
        return "pad whole groups of query heads, as many as there are key heads"
    unit = _unit(held.width, int(longer), size)
    return f"`{held.rule.path}: {held.rule.style}(pad={unit})` pads {held.width} to {longer}"


def _longer(shard: Shard, ratio: Fraction) -> Shard:
    return Shard(shard.dim, tuple(int(block * ratio) for block in shard.blocks))


def _lengthened(shape: Shape, out: Placement, ratio: Fraction) -> Shape:
    assert isinstance(out, Shard)
    return tuple(int(n * ratio) if d == out.dim else n for d, n in enumerate(shape))


def _unit(extent: int, longer: int, size: int) -> int:
    """Return the `pad` that makes ``longer`` of ``extent``."""
    unit = gcd(extent, longer)
    return unit if -(-extent // (unit * size)) * unit * size == longer else longer // size


def _shape_second(node: Node, wanted: list[Shape], ratio: Fraction, held: Mapping) -> tuple:
    return (node.args[0], list(wanted[0]), *node.args[2:])


def _pieces(node: Node, wanted: list[Shape], ratio: Fraction, held: Mapping) -> tuple:
    """Let pieces of the padded dimension be longer."""
    x, sizes, *rest = node.args
    dim = bound_arguments(node)["dim"] % val(x).dim()
    if held[x].shard.dim != dim:
        return node.args
    is_one = isinstance(sizes, int)
    return (x, int(sizes * ratio) if is_one else [shape[dim] for shape in wanted], *rest)


def _bounds(node: Node, wanted: list[Shape], ratio: Fraction, held: Mapping) -> tuple:
    """Let a slice of whole blocks of the padded dimension be one of the longer blocks."""
    x, dim, start, end, *rest = (*node.args, 0, None, None)[:4] + node.args[4:]
    if held[x].shard.dim != dim % val(x).dim():
        return node.args
    extent = int(val(x).shape[dim] / ratio)
    start, end, _ = slice(start, end).indices(extent)
    return (x, dim, int(start * ratio), int(end * ratio), *rest)


def _narrowed(node: Node, wanted: list[Shape], ratio: Fraction, held: Mapping) -> tuple:
    x, dim, start, length = node.args
    if held[x].shard.dim != dim % val(x).dim():
        return node.args
    return (x, dim, int(start * ratio), int(length * ratio))


SIZES = {
    aten.expand.default: _shape_second,
    aten.split.Tensor: _pieces,
    aten.split_with_sizes.default: _pieces,
    aten.slice.Tensor: _bounds,
    aten.narrow.default: _narrowed,
}
