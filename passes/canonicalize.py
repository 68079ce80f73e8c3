"""Give each idea one spelling, so that every later pass and the rule table know it by one name.

Export writes what the model's author wrote: `split(x, 4)`, `x[..., :16]`, `x + 0`. What it already
does itself (views become `reshape`, copies and identities go) is in `ir.export_graph`.

A negative log likelihood of a log-softmax is a cross entropy.

Left as they are, because each is an idea of its own: `linear`, `matmul`, `bmm`, `baddbmm`, and the
`addmm` of Hugging Face's Conv1D, whose weight lies the other way round. Nothing is merged across
nodes: equal layers must stay equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import Node

from autoshard.compiler.pass_base import Numerics, Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.ir.graph_function import BUFFER, Port
from autoshard.ir.node_info import val
from autoshard.ir.program import Level, Program
from autoshard.ir.rewrite import Rewriter
from autoshard.passes._spellings import RULES, positive

aten = torch.ops.aten

# torch's own second names, overload by overload: torch.multiply(x, y) is x * y.
TWINS = """absolute=abs arccos=acos arcsin=asin arctan=atan arctan2=atan2 clip=clamp concat=cat
concatenate=cat divide=div true_divide=div fix=trunc greater=gt greater_equal=ge less=lt
less_equal=le multiply=mul negative=neg not_equal=ne special_erf=erf special_erfc=erfc
special_exp2=exp2 special_expit=sigmoid special_expm1=expm1 special_log1p=log1p subtract=sub
swapaxes=transpose swapdims=transpose"""


def _twins() -> Iterator[tuple[OpOverload, OpOverload]]:
    for pair in TWINS.split():
        one, other = (getattr(aten, name) for name in pair.split("="))
        yield from (
            (getattr(one, name), getattr(other, name))
            for name in one.overloads()
            if name in other.overloads()
        )


# Other spellings of an op with the same arguments. `&` and `|` of Python are bitwise.
SYNONYMS = {
    **dict(_twins()),
    aten.swapaxes.default: aten.transpose.int,
    aten.swapdims.default: aten.transpose.int,
    aten.__and__.Tensor: aten.bitwise_and.Tensor,
    aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.__and__.Scalar: aten.bitwise_and.Scalar,
    aten.__or__.Scalar: aten.bitwise_or.Scalar,
}
# Arguments that count dimensions; for some ops from the result's.
DIMENSIONS = ("dim", "dim0", "dim1", "dims", "start_dim", "end_dim")
OF_RESULT = (aten.unsqueeze.default, aten.stack.default)


@register
@dataclass(frozen=True)
class Canonicalize(Pass):
    """Rewrite synonyms to one spelling and drop what changes nothing.

    before:  a = split(x, 32, -1); b = expand(a[0], [4, 16, 32]); c = mul(b, 1.0)
    after:   a = split_with_sizes(x, [32, 32, 32], 2)

    Establishes `canonical`; costs and numbers stay the same.
    """

    name = "canonicalize"
    group = "capture"
    level = Level.FORWARD
    establishes = frozenset({"canonical"})
    numerics = Numerics.BITWISE

    def run(self, program: Program, ctx: PassContext) -> None:
        """Rewrite node by node, in order, then sweep."""
        rewriter = Rewriter(program.forward, self.name)
        _inline_scalars(program, rewriter)
        _slice_by_lists(program, rewriter)
        for node in tuple(rewriter.graph.nodes):
            if node.op == "call_function":
                _rewrite(rewriter, node)
        rewriter.sweep()


def _inline_scalars(program: Program, rewriter: Rewriter) -> None:
    """Write lifted constants of one number into the graph: full([], 0.5) instead of an input."""
    for name, value in tuple(program.constants.items()):
        node = rewriter.function.node(BUFFER, name)
        if value.dim() or node is None:
            continue
        for user in tuple(node.users):
            with rewriter.before(user):
                made = rewriter.call(
                    aten.full.default, [], value.item(), like=user, dtype=value.dtype, device="cpu"
                )
            user.replace_input_with(node, made)
        rewriter.drop_input(Port(BUFFER, name))
        del program.constants[name]


def _slice_by_lists(program: Program, rewriter: Rewriter) -> None:
    """Write an index by a lifted list of neighbours as a slice: x[:, [-2]] is x[:, -2:-1]."""
    for name, value in tuple(program.constants.items()):
        node = rewriter.function.node(BUFFER, name)
        if node is None or value.dim() != 1 or value.dtype != torch.int64:
            continue
        for user in tuple(node.users):
            dim = _only_indexed(user)
            if dim is None:
                continue
            source, extent = user.args[0], val(user.args[0]).shape[dim]
            first, *rest = places = [at + extent * (at < 0) for at in value.tolist()]
            if places == list(range(first, first + len(places))) and places[-1] < extent:
                with rewriter.before(user):
                    bounds = dim, first, first + 1 + len(rest)
                    rewriter.replace(
                        user, rewriter.call(aten.slice.Tensor, source, *bounds, like=user)
                    )
        if not node.users:
            rewriter.drop_input(Port(BUFFER, name))
            del program.constants[name]


def _only_indexed(node: Node) -> int | None:
    """Return the one dimension that an index takes places of."""
    if node.target is not aten.index.Tensor:
        return None
    given = [dim for dim, index in enumerate(node.args[1]) if index is not None]
    return given[0] if len(given) == 1 else None


def _rewrite(rewriter: Rewriter, node: Node) -> None:
    """Replace ``node`` by what its rule gives; None means that it is canonical already."""
    if node.target in SYNONYMS:
        node.target = SYNONYMS[node.target]
        rewriter.annotate(node)
    _count_from_front(rewriter, node)
    rule = RULES.get(node.target)
    if rule is None:
        return
    with rewriter.before(node):
        made = rule(rewriter, node)
    if made is not None:
        rewriter.replace(node, made)


def _count_from_front(rewriter: Rewriter, node: Node) -> None:
    """Write dimension -1 of three as 2."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return
    args = list(node.args)
    for place, argument in enumerate(schema.arguments[: len(args)]):
        if argument.name in DIMENSIONS:
            args[place] = positive(args[place], _rank(node))
    if args != list(node.args):
        node.args = tuple(args)
        rewriter.annotate(node)


def _rank(node: Node) -> int:
    if node.target in OF_RESULT:
        return val(node).dim()
    source = node.all_input_nodes[0]
    return val(source).dim() if isinstance(val(source), torch.Tensor) else 0
