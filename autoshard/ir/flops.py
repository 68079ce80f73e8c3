"""Floating point operations of one node, from the shapes of its fake values."""

from __future__ import annotations

import math

import torch
from torch.fx import Node

aten = torch.ops.aten

_ATTENTION = {
    aten.scaled_dot_product_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def node_flops(node: Node) -> int:
    """Return 2 x multiply-adds of matrix products, convolutions and attention; 0 for all else."""
    op = node.target
    if op is aten.linear.default:
        return 2 * math.prod(_shape(node)) * _shape(node.args[0])[-1]
    if op in (aten.mm.default, aten.bmm.default, aten.matmul.default):
        return 2 * math.prod(_shape(node)) * _shape(node.args[0])[-1]
    if op in (aten.addmm.default, aten.baddbmm.default):
        return 2 * math.prod(_shape(node)) * _shape(node.args[1])[-1]
    if op in _ATTENTION:
        query, key = _shape(node.args[0]), _shape(node.args[1])
        return 4 * math.prod(query) * key[-2]
    if op is aten.convolution.default or op is aten.conv2d.default:
        return 2 * math.prod(_shape(node)) * math.prod(_shape(node.args[1])[1:])
    return 0


def _shape(node: Node) -> tuple[int, ...]:
    value = node.meta["val"]
    return tuple((value if isinstance(value, torch.Tensor) else value[0]).shape)
