"""Follow the tokens of a sequence through a graph: along which dim of each value they lie.

Sequence parallelism keeps what lies between two split layers on 1/n of the tokens. Nothing here
knows names or model families: an operator that maps each row by itself (a linear layer, a look-up,
a norm) says which dims are rows; those that are not the samples are tokens. From there the rule
table carries them on, through reshapes and attention scores, as if every rank held one token.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from autoshard.ir.node_info import info
from autoshard.ir.placement import REPLICATE, Placement, Shard
from autoshard.ir.rules.call import Shape, call_of, shapes_of, tensor_inputs
from autoshard.ir.rules.table import choose
from autoshard.ops.bias_dropout_add_layer_norm import bias_dropout_add_layer_norm
from autoshard.ops.vocab import vocab_embedding

aten = torch.ops.aten
ours = torch.ops.autoshard
AXIS = "tokens"  # of no mesh: rules are asked how tokens lie, not how ranks hold them
# Each row of the output is made of one row of the input, whatever the last dim.
BY_ROW = frozenset(
    {
        aten.linear.default,
        aten.embedding.default,
        aten.layer_norm.default,
        aten.rms_norm.default,
        ours.add_layer_norm.default,
        ours.add_rms_norm.default,
        bias_dropout_add_layer_norm,
        vocab_embedding,
    }
)
Outs = tuple[Placement, ...]


@dataclass
class Tokens:
    """Where the tokens of each value of one graph lie; asked in program order."""

    known: dict[Node, Outs] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> Tokens:
        """Follow the tokens through a graph."""
        tokens = cls()
        for node in graph.nodes:
            tokens.find(node)
        return tokens

    def along(self, node: Node) -> Shard | None:
        """Return the dim of the tokens, with the tokens of each sample as a block; None if unknown.

        A value of tokens alone (a loss for each) has nothing behind them: it isn't worth a split.
        """
        found = self.find(node)[:1]
        if not found or not isinstance(found[0], Shard):
            return None
        return found[0] if found[0].dim < len(shapes_of(node)[0]) - 1 else None

    def find(self, node: Node) -> Outs:
        """Return where the tokens of each output lie."""
        if node not in self.known:
            self.known[node] = self._find(node) if node.op == "call_function" else (REPLICATE,)
        return self.known[node]

    def _find(self, node: Node) -> Outs:
        if node.target is operator.getitem:
            return (self.find(node.args[0])[node.args[1]],)
        inputs = tensor_inputs(node)
        found = tuple(self.find(n)[0] for n in inputs)
        split = [(n, p) for n, p in zip(inputs, found, strict=True) if isinstance(p, Shard)]
        if not split:
            return self._begin(node)
        if node.target is aten.scaled_dot_product_attention.default:
            return found[:1]  # a row of the output for each query
        return self._carry(node, found, count(*split[0]))

    def _carry(self, node: Node, ins: Outs, tokens: int) -> Outs:
        choice = choose(call_of(node, tokens, axis=AXIS), ins)
        if not choice.proven or not any(isinstance(out, Shard) for out in choice.outs):
            return self._begin(node)
        return choice.outs

    def _begin(self, node: Node) -> Outs:
        """Return the tokens of an operator that works by row on values without known tokens."""
        outs = shapes_of(node)
        batch = info(node).placement("dp")
        if node.target in BY_ROW and isinstance(batch, Shard) and not batch.blocks:
            rows = range(len(outs[0]) - 1)
            dims = [d for d in rows if d != batch.dim and outs[0][d] > 1]
            if dims:
                return tuple(_like(shape, outs[0], dims[0]) for shape in outs)
        return (REPLICATE,) * max(len(outs), 1)


def _like(shape: Shape, first: Shape, dim: int) -> Placement:
    """Return the tokens of one of several outputs: those with all rows have them in one place."""
    return Shard(dim) if shape[:-1] == first[:-1] else REPLICATE


def count(node: Node, tokens: Shard) -> int:
    """Return the number of tokens of one sample."""
    return tokens.blocks[0] if tokens.blocks else shapes_of(node)[0][tokens.dim]
