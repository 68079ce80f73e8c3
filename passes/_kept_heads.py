"""Key heads that several ranks keep: the graph is rewritten as if the model had that many heads.

A head that n ranks share stands n times side by side, ``k_proj f32[16, 32]`` of 2 heads becoming
``f32[32, 32]`` of 4, so that every later pass sees a plain shard. Where the model widens its key
heads to its query heads it then widens n times less. Those are the only places where the copies may
meet; the rule of every operator before them must run on each head by itself. Of a packed q|k|v only
what lies behind the queries is repeated; the queries leave where its outputs are taken apart.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

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
from autoshard.ops.collectives import copy_within, from_copies

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
CUTS = (aten.slice.Tensor, aten.split_with_sizes.default)
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
    walk = _Walk(rewriter, axis, program.mesh.size(axis))
    for fqn, node in program.forward.named(PARAM).items():
        if fqn in kept and node.users:
            walk.begin(node, kept[fqn])
    for node in tuple(program.forward.graph.nodes):
        if walk.reads(node):
            walk.visit(node)
    walk.check_outputs(program.forward.results)


@dataclass(frozen=True)
class _Held:
    """How a value with copies lies: along ``shard.dim`` its first ``own`` elements have none."""

    shard: Shard
    own: int
    times: int

    def lengthened(self, at: int) -> int:
        """Return the place, among the copies, of a place along the dimension of the model's own."""
        return at if at <= self.own else self.own + (at - self.own) * self.times

    def real(self, extent: int) -> int:
        """Return the model's own extent of the dimension."""
        return self.own + (extent - self.own) // self.times


@dataclass
class _Walk:
    rewriter: Rewriter
    axis: str
    size: int
    held: dict[Node, _Held] = field(default_factory=dict)
    dealt: dict[Node, tuple[_Held | None, ...]] = field(default_factory=dict)  # for getitem
    kept: dict[Node, Kept] = field(default_factory=dict)  # by value, where it comes from
    widened: set[Node] = field(default_factory=set)  # query heads are about to be merged in

    def reads(self, node: Node) -> bool:
        """Tell whether a node reads a value with copies."""
        inputs = node.all_input_nodes
        return node.op == "call_function" and any(n in self.held or n in self.dealt for n in inputs)

    def begin(self, weight: Node, kept: Kept) -> None:
        """Give a parameter's placeholder its copies."""
        copies, shape, users = kept.copies, list(val(weight).shape), list(weight.users)
        extent = shape[copies.dim] = copies.lengthened(shape[copies.dim])
        part = (extent - copies.own) // copies.parts
        blocks = (copies.own, *(part,) * copies.parts) if copies.own else ()
        with val(weight).fake_mode:
            weight.meta["val"] = val(weight).new_empty(shape)
        made = self._shared(weight, copies)
        for user in users:
            user.replace_input_with(weight, made)
        self.held[made] = _Held(Shard(copies.dim, blocks), copies.own, copies.times)
        self.kept[made] = kept

    def _shared(self, weight: Node, copies: Copies) -> Node:
        """Return a weight whose gradient is summed over the ranks that hold the same heads."""
        reader = next(iter(weight.users))
        args = (weight, copies.times, self.axis, *((copies.own_rows,) if copies.own else ()))
        with self.rewriter.before(reader):
            return self.rewriter.call(copy_within, *args, like=reader, placements={})

    def visit(self, node: Node) -> None:
        """Repeat the heads in what one call computes."""
        source = next(n for n in node.all_input_nodes if n in self.kept)
        self.kept[node] = self.kept[source]
        before = shapes_of(node)[0]
        if node.target is operator.getitem:
            alone = val(node)
            self.rewriter.refake(node)
            self._go_on(node, self.dealt[source][node.args[1]], alone)
        elif source in self.widened:
            self._merge(node, source, before)
        elif node.target is aten.scaled_dot_product_attention.default and self._may_share(node):
            self.rewriter.refake(node)
        elif node.target is aten.expand.default:
            self._expand(node, source, before)
        elif node.target in CUTS and bound_arguments(node)["dim"] == self._at(source):
            self._cut(node, source)
        else:
            if node.target in VIEWS:
                literal = self._viewed(node, source, before)
                node.args = (source, literal, *node.args[2:])
            self._follow(node, source)

    def check_outputs(self, results: Sequence[Node | None]) -> None:
        """Refuse a model that gives its key heads out: they would come out repeated."""
        shown = next((node for node in results if node in self.held), None)
        if shown is not None:
            raise self._refusal(shown)

    def _go_on(self, node: Node, held: _Held | None, alone: torch.Tensor) -> None:
        """Follow a value further, or leave queries, of which there are no copies.

        The only key head is on every rank: from here on it is ``alone``, as in the model.
        """
        if held is not None and (held.own or not self.kept[node].copies.is_whole):
            self.held[node] = held
            return
        del self.kept[node]
        if held is not None:
            users, shard = tuple(node.users), held.shard
            args = (shard.dim, list(shard.blocks), self.axis, self.size, alone.shape[shard.dim])
            with self.rewriter.after(node):
                made = self.rewriter.call(from_copies, node, *args, like=node, placements={})
            for user in users:
                user.replace_input_with(node, made)

    def _at(self, node: Node) -> int:
        return self.held[node].shard.dim

    def _follow(self, node: Node, source: Node) -> None:
        """Compute a shape again, where the operator's rule runs on each head by itself."""
        try:
            self.rewriter.refake(node)
        except (RuntimeError, ValueError) as error:
            raise self._refusal(node) from error
        ins = tuple(self._placement(n) for n in tensor_inputs(node))
        choice = choose(call_of(node, self.size), ins)
        if choice.wants != ins:
            raise self._refusal(node)
        pairs = zip(choice.outs, shapes_of(node), strict=True)
        found = tuple(self._came_out(node, source, *pair) for pair in pairs)
        if isinstance(val(node), (tuple, list)):
            self.dealt[node] = found
        else:
            self.held[node] = found[0]
        self.rewriter.annotate(node)

    def _placement(self, node: Node) -> Placement:
        return self.held[node].shard if node in self.held else REPLICATE

    def _came_out(self, node: Node, source: Node, found: Placement, shape: Shape) -> _Held:
        """Return how an output lies; queries must still come first in it."""
        held, extent = self.held[source], shapes_of(source)[0][self._at(source)]
        if not isinstance(found, Shard):
            raise self._refusal(node)
        own, rest = divmod(held.own * shape[found.dim], extent)
        if own and (rest or len(found.blocks) != len(held.shard.blocks)):
            raise self._refusal(node)
        return _Held(found, own, held.times)

    def _cut(self, node: Node, source: Node) -> None:
        """Take a packed value apart: queries by themselves are like any other value."""
        held, dim, alone = self.held[source], self._at(source), val(node)
        extent = held.real(shapes_of(source)[0][dim])
        if node.target is aten.slice.Tensor:
            start, stop, step = slice(*(*node.args[2:], None, None, None)[:3]).indices(extent)
            pieces = [(start, stop)]
            edges = held.lengthened(start), held.lengthened(stop)
            self.rewriter.set_args(node, source, dim, *edges, *((step,) if step != 1 else ()))
        else:
            pieces = list(pairwise(accumulate(node.args[1], initial=0)))
            sizes = [held.lengthened(stop) - held.lengthened(start) for start, stop in pieces]
            self.rewriter.set_args(node, source, sizes, dim)
        choice = choose(call_of(node, self.size), (held.shard,))
        if choice.refusal:
            raise self._wrong_parts(node, source, pieces)
        found = tuple(
            _Held(shard, max(held.own - start, 0), held.times) if stop > held.own else None
            for shard, (start, stop) in zip(_shards(choice.outs), pieces, strict=True)
        )
        if node.target is aten.slice.Tensor:
            self._go_on(node, found[0], alone)
        else:
            self.dealt[node] = found

    def _viewed(self, node: Node, source: Node, before: Shape) -> list[int]:
        """Return the sizes of a view with the heads repeated."""
        held, given = self.held[source], shapes_of(source)[0]
        extent = given[held.shard.dim]
        for dim in range(len(before)):
            own, rest = divmod(held.own * before[dim], held.real(extent))
            sizes = list(before)
            sizes[dim] = own + (before[dim] - own) * held.times
            blocks = tuple(block * sizes[dim] // extent for block in held.shard.blocks)
            found = reshape_shard(held.shard, given, tuple(sizes), self.size)
            if not rest and found == Shard(dim, blocks):
                return sizes
        raise self._refusal(node)

    def _expand(self, node: Node, source: Node, before: Shape) -> None:
        """Widen each key head to its share of query heads; other dims are expanded as they were."""
        at, given, times = self._at(source), shapes_of(source)[0], self.held[source].times
        sizes = list(before)
        sizes[at] = given[at]
        widens = at + 1 < len(sizes) and given[at + 1] == 1 != sizes[at + 1]
        if widens:
            self._check_heads(node, source)
            if sizes[at + 1] % times:
                raise self._refusal(node)
            sizes[at + 1] //= times
            self.widened.add(node)
        self.rewriter.set_args(node, source, sizes, *node.args[2:])
        self.held[node] = self.held[source]

    def _merge(self, node: Node, source: Node, before: Shape) -> None:
        """Pass a widened value on to the view that makes query heads of it."""
        at, given = self._at(source), shapes_of(source)[0]
        if node.target in PASSING:
            self.rewriter.refake(node)
            self.held[node] = self.held[source]
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
        if query in self.held or heads < 0:
            return False
        shares = all(n in self.held and self._at(n) == heads for n in (key, value))
        if not shares or not given["enable_gqa"]:
            return False
        self._check_heads(node, key)
        if shapes_of(query)[0][heads] % shapes_of(key)[0][heads]:
            return False
        del self.kept[node]
        return True

    def _check_heads(self, node: Node, source: Node) -> None:
        """Refuse copies of several heads: a rank's query heads would read a wrong one."""
        copies = self.kept[source].copies
        is_packed = bool(self.held[source].shard.blocks)
        if is_packed or shapes_of(source)[0][self._at(source)] != copies.pieces * copies.times:
            raise self._refusal(node)

    def _wrong_parts(
        self, node: Node, source: Node, pieces: Sequence[tuple[int, int]]
    ) -> PlacementError:
        """Return the error for outputs that are taken apart elsewhere than `parts` says."""
        kept, held, where = self.kept[source], self.held[source], info(node).source
        parts = [
            size if at == 0 and held.own else size // held.times
            for at, size in enumerate(held.shard.blocks)
        ]
        taken = " and ".join(f"{start} to {stop}" for start, stop in pieces)
        return PlacementError(
            f"`{kept.rule.path}` is not packed as `parts` says: the model takes {taken} of"
            f" {held.real(shapes_of(source)[0][held.shard.dim])}",
            code="AS403",
            span=kept.rule.rule.span,
            label=f"this splits {' + '.join(map(str, parts))}",
            help="name the sizes that the model takes its outputs apart into, queries first",
            notes=(f"its outputs are taken apart at {where}",) if where else (),
        )

    def _refusal(self, node: Node) -> PlacementError:
        source = next(n for n in node.all_input_nodes if n in self.kept)
        kept = self.kept[source]
        at = self._at(source) if source in self.held else None
        found = 0 if at is None else shapes_of(source)[0][at] // kept.copies.times
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


def _shards(outs: Sequence[Placement]) -> Iterator[Shard]:
    """Return the placements of what is cut along a split dimension."""
    for found in outs:
        assert isinstance(found, Shard), "a split dimension that is cut stays split"
        yield found
