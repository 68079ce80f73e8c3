"""Faults of number types: what is computed, rounded, summed or stored in another one."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from autoshard.ir.graph_function import ACCUMULATED, GRAD, PARAM
from autoshard.ir.node_info import val
from autoshard.ir.program import Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ops import collectives, vocab
from autoshard.testing.faults import PASS_NAME, Fault, Plant, after, calls, functions, set_bucket

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
LOSSES = (
    vocab.vocab_cross_entropy,
    vocab.vocab_cross_entropy_backward,
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten.nll_loss_forward.default,
)
NORMS = (aten.native_layer_norm.default, aten.native_layer_norm_backward.default)
HALF = torch.bfloat16


def lose_narrow(program: Program) -> Iterator[Plant]:
    """Compute a loss in bfloat16."""
    yield from _computed_in(program, LOSSES, HALF)


def norm_narrow(program: Program) -> Iterator[Plant]:
    """Compute a norm in bfloat16."""
    yield from _computed_in(program, NORMS, HALF)


def multiply_wide(program: Program) -> Iterator[Plant]:
    """Compute a matrix product in float32."""
    yield from _computed_in(program, PRODUCTS, torch.float32)


def multiply_in_another_half(program: Program) -> Iterator[Plant]:
    """Compute a matrix product in the other half precision type."""
    yield from _computed_in(program, PRODUCTS, torch.float16)


def round_loss(program: Program) -> Iterator[Plant]:
    """Round what a loss reads, or what it gives, to bfloat16."""
    for rewriter, node in _mixed(program, LOSSES):
        for read in _read(node, torch.float32):
            yield lambda r=rewriter, n=read: _round(r, n)


def round_gradient(program: Program) -> Iterator[Plant]:
    """Round a parameter's gradient to bfloat16 before it is added up in float32."""
    for function in functions(program):
        rewriter = Rewriter(function, PASS_NAME)
        found = [n for n in function.named_results(GRAD).values() if n is not None]
        for node in function.graph.find_nodes(op="call_function", target=collectives.pack):
            found += node.all_input_nodes
        for grad in found:
            # A cast one was in bfloat16 before.
            is_wide = val(grad).dtype is torch.float32 and grad.target is not aten._to_copy.default
            if program.precision is not None and is_wide:
                yield lambda r=rewriter, n=grad: _round(r, n)


def round_parameter(program: Program) -> Iterator[Plant]:
    """Read a float32 parameter of a norm or an addition as rounded to bfloat16."""
    for function in functions(program):
        rewriter = Rewriter(function, PASS_NAME)
        stored = [n for n in function.graph.nodes if n.target is collectives.view_at]
        for node in (*stored, *function.named(PARAM).values()):
            wide = [u for u in node.users if u.target in (aten.add.Tensor, *NORMS)]
            if program.precision is not None and wide and val(node).dtype is torch.float32:
                yield lambda r=rewriter, n=node: _round(r, n)


def accumulate_narrow(program: Program) -> Iterator[Plant]:
    """Sum the gradients of micro-batches in bfloat16."""
    for index, bucket in enumerate(program.buckets):
        if program.precision is not None and bucket.grad_dtype is torch.float32:
            yield lambda i=index: set_bucket(program, i, summed_in=HALF)


def take_narrow_sum(program: Program) -> Iterator[Plant]:
    """Take the sum of gradients as if it were in bfloat16, where its bucket is in float32."""
    for function in functions(program, ("R",)):
        for node in function.named(ACCUMULATED).values():
            if program.precision is not None:
                yield lambda n=node: _retype(n, HALF)


def store_narrow(program: Program) -> Iterator[Plant]:
    """Let the optimizer update parameters that are stored in bfloat16."""
    for index, bucket in enumerate(program.buckets):
        if program.precision is not None and bucket.dtype is torch.float32:
            yield lambda i=index: set_bucket(program, i, dtype=HALF)


FAULTS = (
    Fault("lose-narrow", "a loss is computed in bf16", lose_narrow),
    Fault("norm-narrow", "a norm is computed in bf16", norm_narrow),
    Fault("multiply-wide", "a product is computed in fp32", multiply_wide),
    Fault("multiply-in-another-half", "a product is in fp16, not bf16", multiply_in_another_half),
    Fault("round-loss", "what a loss reads is rounded", round_loss),
    Fault("round-gradient", "a gradient is rounded before its sum", round_gradient),
    Fault("round-parameter", "an fp32 parameter is rounded", round_parameter),
    Fault("accumulate-narrow", "gradients are summed in bf16", accumulate_narrow),
    Fault("take-narrow-sum", "R reads a sum in another type", take_narrow_sum),
    Fault("store-narrow", "master weights are in bf16", store_narrow),
)


def _mixed(program: Program, ops: object) -> Iterator[tuple[Rewriter, Node]]:
    """Yield calls of ``ops`` in a program that computes in several number types."""
    if program.precision is not None:
        yield from calls(program, ops)


def _computed_in(program: Program, ops: object, dtype: torch.dtype) -> Iterator[Plant]:
    for rewriter, node in _mixed(program, ops):
        yield lambda r=rewriter, n=node: _compute_in(r, n, dtype)


def _read(node: Node, dtype: torch.dtype) -> list[Node]:
    values = [n for n in node.all_input_nodes if isinstance(val(n), torch.Tensor)]
    return [n for n in values if val(n).dtype is dtype]


def _compute_in(rewriter: Rewriter, node: Node, dtype: torch.dtype) -> None:
    """Let an operator read all its floats in ``dtype``, and its users what they read before."""
    results = [u for u in node.users if u.target is operator.getitem] or [node]
    before = [val(result).dtype for result in results]
    casts = {}
    for source in node.all_input_nodes:
        if val(source).is_floating_point() and val(source).dtype is not dtype:
            with rewriter.before(node):
                casts[source] = _cast(rewriter, source, dtype)
    node.args = map_arg(node.args, lambda read: casts.get(read, read))
    rewriter.refake(node)
    for result, was in zip(results, before, strict=True):
        if result is not node:
            rewriter.refake(result)
        if val(result).dtype is not was:
            _cast_after(rewriter, result, was)


def _round(rewriter: Rewriter, node: Node) -> None:
    """Round a value to bfloat16 and give it on in the type from before."""
    was = val(node).dtype
    after(rewriter, node, aten._to_copy.default, dtype=HALF)
    (narrow,) = node.users
    _cast_after(rewriter, narrow, was)


def _cast_after(rewriter: Rewriter, node: Node, dtype: torch.dtype) -> None:
    after(rewriter, node, aten._to_copy.default, dtype=dtype)


def _cast(rewriter: Rewriter, node: Node, dtype: torch.dtype) -> Node:
    return rewriter.call(aten._to_copy.default, node, like=node, dtype=dtype)


def _retype(node: Node, dtype: torch.dtype) -> None:
    with val(node).fake_mode:
        node.meta["val"] = val(node).to(dtype)
