"""Put our counter-based dropout in the place of torch's, and refuse every other random op.

Sites are numbered in program order at capture, before any pass, so they do not depend on the plan:

    native_dropout(x, 0.1, True)[0]      -->  dropout(x, rng, 0.1, site=3)
    sdpa(q, k, v, mask, 0.1, causal)     -->  matmul(dropout(softmax(matmul(q * s, k^T) + mask)), v)
"""

from __future__ import annotations

import math
import operator
from typing import NoReturn

import torch
from torch.fx import GraphModule, Node

from autoshard.compat import FakeTensorMode
from autoshard.diagnostics import CaptureError
from autoshard.ir.graph_function import RNG, GraphFunction, Port
from autoshard.ir.node_info import info, val
from autoshard.ir.rewrite import Rewriter
from autoshard.ir.user_line import span_of
from autoshard.ops.dropout import RNG_SHAPE, DropoutArgs, dropout

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
DROPOUTS = (aten.dropout.default, aten.native_dropout.default)


def replace_dropout(function: GraphFunction, mode: FakeTensorMode) -> int:
    """Rewrite all dropout of ``function`` and return how many sites there are."""
    sites = _Sites(function, mode)
    for node in tuple(function.graph.nodes):
        if node.target in DROPOUTS:
            sites.rewrite_dropout(node)
        elif node.target is SDPA and _argument(node, 4, "dropout_p", 0.0) > 0.0:
            sites.rewrite_attention(node)
        elif _is_random(node):
            _refuse(node)
    return sites.count


def respell_inplace(module: GraphModule) -> None:
    """Write dropout(inplace=True) as a copy of plain dropout, before in-place writes go.

    before:  y = dropout_(x, p, train)
    after:   y = copy_(x, dropout(x, p, train))
    """
    for part in (p for p in module.modules() if isinstance(p, GraphModule)):
        for node in part.graph.find_nodes(op="call_function", target=aten.dropout_.default):
            with part.graph.inserting_before(node):
                dropped = part.graph.call_function(aten.dropout.default, node.args)
                dropped.meta = dict(node.meta)
            node.target, node.args = aten.copy_.default, (node.args[0], dropped)
        part.recompile()


class _Sites:
    def __init__(self, function: GraphFunction, mode: FakeTensorMode) -> None:
        self.function = function
        self.rewriter = Rewriter(function, "capture")
        self.mode = mode
        self.count = 0

    def rewrite_dropout(self, node: Node) -> None:
        """Replace one dropout, or drop it where it does nothing."""
        x, p, train = (*node.args, True)[:3]
        with self.rewriter.before(node):
            result = self.dropout(x, p, node) if train and p > 0.0 else x
        if node.target is aten.dropout.default:
            self.rewriter.replace(node, result)
            return
        for user in tuple(node.users):
            if user.target is not operator.getitem or user.args[1] != 0:
                _fail(node, "the model reads the mask of a dropout")
            self.rewriter.replace(user, result)
        self.function.graph.erase_node(node)

    def rewrite_attention(self, node: Node) -> None:
        """Spell out scaled dot product attention around its dropout."""
        query, key, value = node.args[:3]
        mask = _argument(node, 3, "attn_mask", None)
        causal = _argument(node, 5, "is_causal", False)
        scale = node.kwargs.get("scale") or 1.0 / math.sqrt(val(query).shape[-1])
        with self.rewriter.before(node):
            if node.kwargs.get("enable_gqa"):
                heads = val(query).shape[-3]
                key, value = self.repeat(key, heads, node), self.repeat(value, heads, node)
            scores = self.call(aten.mul.Tensor, query, scale, like=node)
            flipped = self.call(aten.transpose.int, key, -2, -1, like=node)
            scores = self.call(aten.matmul.default, scores, flipped, like=node)
            scores = self.masked(scores, mask, causal, node)
            # A row that is masked out whole gives zeros in torch's attention, not NaN.
            softmax = aten.softmax.int if mask is None else aten._safe_softmax.default
            weights = self.call(softmax, scores, -1, like=node)
            weights = self.dropout(weights, _argument(node, 4, "dropout_p", 0.0), node)
            result = self.call(aten.matmul.default, weights, value, like=node)
        self.rewriter.replace(node, result)

    def masked(self, scores: Node, mask: Node | None, causal: bool, like: Node) -> Node:
        """Return the scores with what may not be seen at minus infinity."""
        if causal:
            shape = list(val(scores).shape[-2:])
            ones = self.call(aten.ones.default, shape, like=like, dtype=torch.bool, device="cpu")
            mask = self.call(aten.tril.default, ones, like=like)
        if mask is None:
            return scores
        if val(mask).dtype is not torch.bool:
            return self.call(aten.add.Tensor, scores, mask, like=like)
        hidden = self.call(aten.bitwise_not.default, mask, like=like)
        return self.call(aten.masked_fill.Scalar, scores, hidden, -math.inf, like=like)

    def repeat(self, value: Node, heads: int, like: Node) -> Node:
        """Return key or value heads repeated for the query heads that share them."""
        *batch, kv, length, width = val(value).shape
        wide = self.call(aten.unsqueeze.default, value, -3, like=like)
        shape = [*batch, kv, heads // kv, length, width]
        wide = self.call(aten.expand.default, wide, shape, like=like)
        return self.call(aten.reshape.default, wide, [*batch, heads, length, width], like=like)

    def dropout(self, x: Node, p: float, like: Node) -> Node:
        """Make the dropout of the next site."""
        if p >= 1.0:
            _fail(like, f"dropout with p = {p}, which drops everything,")
        site, self.count = self.count, self.count + 1
        return self.call(dropout, *DropoutArgs(x, self.rng(), p, site), like=like)

    def rng(self) -> Node:
        """Return the placeholder of seed, step and sample offset."""
        found = self.function.node(RNG)
        if found is not None:
            return found
        with self.mode:
            value = torch.empty(RNG_SHAPE, dtype=torch.int64)
        return self.rewriter.placeholder(Port(RNG), value)

    def call(self, op: object, *args: object, like: Node, **kwargs: object) -> Node:
        """Make a node at the place of ``like``."""
        return self.rewriter.call(op, *args, like=like, **kwargs)


def _argument(node: Node, place: int, name: str, default: object) -> object:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _is_random(node: Node) -> bool:
    op = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()) or op is SDPA:
        return False
    # Recurrent layers draw between their layers, if at all.
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return given.get("dropout") != 0.0 and given.get("train") is not False


def _refuse(node: Node) -> None:
    _fail(node, f"random operator `{node.target}`")


def _fail(node: Node, message: str) -> NoReturn:
    record = info(node)
    where = f" in `{record.path}`" if record.path else ""
    raise CaptureError(
        f"{message}{where}",
        code="AS709",
        span=span_of(record.source),
        help="use nn.Dropout or torch.nn.functional.dropout, or no randomness in the model",
    )
