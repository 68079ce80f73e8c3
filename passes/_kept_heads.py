"""Key heads that several ranks keep: the graph is rewritten as if the model had that many heads.

A head that n ranks share stands n times side by side, ``k_proj f32[16, 32]`` of 2 heads becoming
``f32[32, 32]`` of 4, so that every later pass sees a plain shard. Where the model widens its key
heads to its query heads it then widens n times less. Those are the only places where the copies may
meet; the rule of every operator before them must run on each head by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from autoshard.diagnostics import PlacementError
from autoshard.dsl.resolve import ResolvedRule
from autoshard.ir.graph_function import PARAM
from autoshard.ir.node_info import info, val
from autoshard.ir.params import Copies
from autoshard.ir.placement import REPLICATE, Placement, Shard
from autoshard.ir.program import Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ir.rules.call import Shape, bound_arguments, call_of, shapes_of, tensor_inputs
from autoshard.ir.rules.reshape import reshape_shard
from autoshard.ir.rules.table import choose
from autoshard.ops.collectives import copy_within

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
PASSING = (aten.clone.default, aten._to_copy.default)


@dataclass(frozen=True)
class Kept:
    """A parameter whose heads are kept on several ranks, and the rule that asks for it."""

    copies: Copies
    rule: ResolvedRule


def keep_heads(program: Program, rewriter: Rewriter, kept: Mapping[str, Kept], axis: str) -> None:
    """Repeat the heads of the ``kept`` parameters through the forward graph, or refuse by name.

    rewrite: ``linear(x, w f32[16, 32])`` --> ``linear(x, copy_within(w f32[32, 32], 2))``
    """
    walk = _Walk(rewriter, program.mesh.size(axis))
    for fqn, node in program.forward.named(PARAM).items():
        if fqn in kept and node.users:
            walk.begin(node, kept[fqn], axis)
    for node in tuple(program.forward.graph.nodes):
        if node.op == "call_function" and any(n in walk.dims for n in node.all_input_nodes):
            walk.visit(node)
    walk.check_outputs(program.forward.results)


@dataclass
class _Walk:
    rewriter: Rewriter
    size: int
    dims: dict[Node, int | tuple[int, ...]] = field(default_factory=dict)  # that have the heads
    kept: dict[Node, Kept] = field(default_factory=dict)  # by value, where it comes from
    widened: set[Node] = field(default_factory=set)  # query heads are about to be merged in

    def begin(self, weight: Node, kept: Kept, axis: str) -> None:
        """Give a parameter's placeholder its copies."""
        copies = kept.copies
        shape = list(val(weight).shape)
        shape[copies.dim] *= copies.times
        users = list(weight.users)
        with val(weight).fake_mode:
            weight.meta["val"] = val(weight).new_empty(shape)
        with self.rewriter.before(users[0]):
            args = (weight, copies.times, axis)
            made = self.rewriter.call(copy_within, *args, like=users[0], placements={})
        for user in users:
            user.replace_input_with(weight, made)
        self.dims[made], self.kept[made] = copies.dim, kept

    def visit(self, node: Node) -> None:
        """Repeat the heads in what one call computes."""
        source = next(n for n in node.all_input_nodes if n in self.dims)
        self.kept[node] = self.kept[source]
        before = shapes_of(node)[0]
        if node.target is operator.getitem:
            self.rewriter.refake(node)
            self.dims[node] = self.dims[source][node.args[1]]
        elif source in self.widened:
            self._merge(node, source, before)
        elif node.target is aten.scaled_dot_product_attention.default and self._may_share(node):
            self.rewriter.refake(node)
        elif node.target is aten.expand.default:
            self._expand(node, source, before)
        else:
            if node.target in VIEWS:
                literal = self._viewed(node, source, before)
                node.args = (source, literal, *node.args[2:])
            self._follow(node)

    def check_outputs(self, results: Sequence[Node | None]) -> None:
        """Refuse a model that gives its key heads out: they would come out repeated."""
        shown = next((node for node in results if node in self.dims), None)
        if shown is not None:
            raise self._refusal(shown)

    def _follow(self, node: Node) -> None:
        """Compute a shape again, where the operator's rule runs on each head by itself."""
        try:
            self.rewriter.refake(node)
        except (RuntimeError, ValueError) as error:
            raise self._refusal(node) from error
        ins = tuple(self._placement(n) for n in tensor_inputs(node))
        choice = choose(call_of(node, self.size), ins)
        if choice.wants != ins or not all(isinstance(p, Shard) for p in choice.outs):
            raise self._refusal(node)
        dims = tuple(p.dim for p in choice.outs)
        self.dims[node] = dims if isinstance(val(node), (tuple, list)) else dims[0]
        self.rewriter.annotate(node)

    def _placement(self, node: Node) -> Placement:
        return Shard(self.dims[node]) if node in self.dims else REPLICATE

    def _viewed(self, node: Node, source: Node, before: Shape) -> list[int]:
        """Return the sizes of a view with the heads repeated."""
        at, given = self.dims[source], shapes_of(source)[0]
        for dim in range(len(before)):
            sizes = list(before)
            sizes[dim] *= self.kept[source].copies.times
            if reshape_shard(Shard(at), given, tuple(sizes), self.size) == Shard(dim):
                return sizes
        raise self._refusal(node)

    def _expand(self, node: Node, source: Node, before: Shape) -> None:
        """Widen each key head to its share of query heads; other dims are expanded as they were."""
        at, given, times = self.dims[source], shapes_of(source)[0], self._times(source)
        sizes = list(before)
        sizes[at] *= times
        widens = at + 1 < len(sizes) and given[at + 1] == 1 != sizes[at + 1]
        if widens:
            self._check_heads(node, source)
            if sizes[at + 1] % times:
                raise self._refusal(node)
            sizes[at + 1] //= times
            self.widened.add(node)
        self.rewriter.set_args(node, source, sizes, *node.args[2:])
        self.dims[node] = at

    def _merge(self, node: Node, source: Node, before: Shape) -> None:
        """Pass a widened value on to the view that makes query heads of it."""
        at, given = self.dims[source], shapes_of(source)[0]
        if node.target in PASSING:
            self.rewriter.refake(node)
            self.dims[node] = at
            self.widened.add(node)
            return
        merged = (*given[:at], given[at] * given[at + 1], *given[at + 2 :])
        if node.target not in VIEWS or before != merged:
            raise self._refusal(node)
        self.rewriter.refake(node)
        del self.kept[node]

    def _may_share(self, node: Node) -> bool:
        """Tell whether attention itself shares each key head among query heads."""
        given = bound_arguments(node)
        query, key, value = (given[name] for name in ("query", "key", "value"))
        heads = val(query).dim() - 3
        if not given["enable_gqa"] or query in self.dims or heads < 0:
            return False
        shares = all(self.dims.get(n) == heads for n in (key, value))
        if shares:
            self._check_heads(node, key)
        return shares and shapes_of(query)[0][heads] % shapes_of(key)[0][heads] == 0

    def _check_heads(self, node: Node, source: Node) -> None:
        """Refuse copies of several heads: a rank's query heads would read a wrong one."""
        copies, at = self.kept[source].copies, self.dims[source]
        if shapes_of(source)[0][at] != copies.pieces * copies.times:
            raise self._refusal(node)

    def _times(self, source: Node) -> int:
        return self.kept[source].copies.times

    def _refusal(self, node: Node) -> PlacementError:
        source = next(n for n in node.all_input_nodes if n in self.kept)
        kept = self.kept[source]
        at = self.dims.get(source)
        found = shapes_of(source)[0][at] // kept.copies.times if isinstance(at, int) else 0
        where = info(node).source
        return PlacementError(
            f"`{kept.rule.path}` has no {kept.copies.pieces} heads that {kept.copies.times} ranks"
            " can keep each",
            code="AS402",
            span=kept.rule.rule.span,
            label=f"'{node.target}' meets {found} along dim {at} of {list(shapes_of(source)[0])}",
            help="give the key and the value layer the same rule; `replicate` is tp / key heads",
            notes=(f"its heads go into {where}",) if where else (),
        )
