"""Find normalisations over the last dimension, however the model spells them.

    layer    layer_norm(x, [D], weight, bias, eps)
    rms      rms_norm(x, [D], weight, eps)
    rms      weight * cast(cast(x) * rsqrt(mean(cast(x) ** 2, -1) + eps)), as Llama and T5 write it

The third may lack the weight or the casts, have its factors in any order, and divide by the root.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from autoshard.ir.node_info import val

aten = torch.ops.aten
LAYER, RMS = "layer", "rms"
_DEFAULTS = {LAYER: (None, None, 1e-5), RMS: (None, None)}  # weight, bias, eps; weight, eps
_ROOTS = {aten.rsqrt.default: aten.mul.Tensor, aten.sqrt.default: aten.div.Tensor}


@dataclass(frozen=True)
class Norm:
    """One normalisation: ``result`` is ``kind`` of norm of ``x``.

    ``dims`` counts the last dimensions it is over; ``inside`` are the nodes that only it reads.
    """

    kind: str
    x: Node
    weight: object
    bias: object
    eps: float
    result: Node
    dims: int = 1
    inside: frozenset[Node] = field(default_factory=frozenset)


def find_norms(graph: Graph) -> Iterator[Norm]:
    """Yield every normalisation of a canonical forward graph, in program order."""
    for node in graph.nodes:
        if node.target is aten.layer_norm.default:
            weight, bias, eps = _given(node, LAYER)
            yield Norm(LAYER, node.args[0], weight, bias, eps, node, len(node.args[1]))
        elif node.target is aten.rms_norm.default:
            weight, eps = _given(node, RMS)
            eps = torch.finfo(val(node).dtype).eps if eps is None else eps
            yield Norm(RMS, node.args[0], weight, None, eps, node, len(node.args[1]))
        elif node.target in _ROOTS:
            norm = _spelled_out(node)
            if norm is not None:
                yield norm


def _given(node: Node, kind: str) -> tuple:
    """Return the arguments behind x and the normalized shape, defaults filled in."""
    defaults = _DEFAULTS[kind]
    given = node.args[2 : 2 + len(defaults)]
    return (*given, *defaults[len(given) :])


def _spelled_out(root: Node) -> Norm | None:
    """Return the RMSNorm around a root of a mean square, None if it is something else."""
    below = _mean_square(root)
    if below is None:
        return None
    wide, eps, inside = below
    normed = _only_user(root, _ROOTS[root.target])
    if normed is None or normed.args not in _orders(normed, wide, root):
        return None
    x, seen = wide, [*inside, root, normed]
    if wide.target is aten._to_copy.default:
        x, seen = wide.args[0], [wide, *seen]
    result, weight, tail = _scaled(normed)
    chain = frozenset([*seen, *tail]) - {result}
    return Norm(RMS, x, weight, None, eps, result, inside=chain)


def _orders(normed: Node, wide: Node, root: Node) -> tuple[tuple[Node, Node], ...]:
    """Return the arguments that make ``wide`` times, or over, its root."""
    if normed.target is aten.div.Tensor:
        return ((wide, root),)
    return (wide, root), (root, wide)


def _mean_square(root: Node) -> tuple[Node, float, tuple[Node, ...]] | None:
    """Return x and eps where ``root`` is of ``mean(x ** 2, -1, keepdim) + eps``."""
    total = root.args[0]
    if total.target is not aten.add.Tensor or not isinstance(total.args[1], int | float):
        return None
    mean = total.args[0]
    if mean.target is not aten.mean.dim or tuple(mean.args[2:3]) != (True,):
        return None
    square = mean.args[0]
    x = _squared(square)
    if x is None or list(mean.args[1]) not in ([-1], [val(square).dim() - 1]):
        return None
    return x, float(total.args[1]), (total, mean, square)


def _squared(square: Node) -> Node | None:
    if square.target is aten.pow.Tensor_Scalar and square.args[1] == 2:
        return square.args[0]
    is_product = square.target is aten.mul.Tensor and square.args[0] is square.args[1]
    return square.args[0] if is_product else None


def _scaled(normed: Node) -> tuple[Node, Node | None, list[Node]]:
    """Return the end of ``cast(weight * cast(normed))``, the weight, and the nodes on the way."""
    way = [normed, *_casts(normed)]
    product = _only_user(way[-1], aten.mul.Tensor)
    weight = None
    if product is not None:
        weight = next((a for a in product.args if a is not way[-1]), None)
    width = val(normed).shape[-1:]
    if not isinstance(weight, Node) or val(weight).shape != width:
        return way[-1], None, way
    way += [product, *_casts(product)]
    return way[-1], weight, way


def _casts(node: Node) -> list[Node]:
    cast = _only_user(node, aten._to_copy.default)
    return [] if cast is None else [cast]


def _only_user(node: Node, op: object) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is op else None
