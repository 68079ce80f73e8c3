"""Check in which number types buckets are stored, read and reduced: as the plan says.

Erasure reads through casts, so a sum that is taken in too narrow a type is seen here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from autoshard.ir.buckets import gathers_of, reduce_dtype, uncast
from autoshard.ir.graph_function import (
    ACCUMULATED,
    FLAT,
    FLAT_GRAD,
    FULL,
    FULL_GRAD,
    LOSS,
    PARAM,
    GraphFunction,
)
from autoshard.ir.node_info import origin, val
from autoshard.ir.program import Bucket, Program
from autoshard.ops import collectives

GRADIENTS = (FLAT_GRAD, FULL_GRAD)
WAYS = collectives.ON_BUCKETS - {collectives.all_gather, collectives.all_gather_start}


def check_number_types(program: Program) -> Iterator[str]:
    """Say which bucket is stored, gathered or reduced in another number type than the plan's."""
    buckets = {bucket.name: bucket for bucket in program.buckets}
    yield from _stored(program)
    for name, function in program.functions():
        yield from _taken(buckets, name, function)
        for bucket, node in gathers_of(function).items():
            if val(node).dtype != buckets[bucket].read_dtype:
                yield _told(name, node, f"gathers bucket '{bucket}'", buckets[bucket].read_dtype)
        yield from _reduced(program, buckets, name, function)
        yield from _read(program, name, function)


def _stored(program: Program) -> Iterator[str]:
    plan = program.precision
    for bucket in program.buckets:
        wanted = {
            "stored": plan.master if plan and bucket.dtype.is_floating_point else bucket.dtype,
            "read": plan.params if plan and bucket.dtype.is_floating_point else bucket.dtype,
            "summed": plan.grads if plan else bucket.dtype,
        }
        have = {
            "stored": bucket.dtype,
            "read": bucket.read_dtype,
            "summed": bucket.grad_dtype,
        }
        for how, dtype in have.items():
            if dtype != wanted[how]:
                yield f"bucket '{bucket.name}' is {how} in {dtype} and must be in {wanted[how]}"


def _taken(buckets: dict[str, Bucket], name: str, function: GraphFunction) -> Iterator[str]:
    """Say which bucket a graph takes in, or gives back, in another type than it is held in."""
    ports = zip(
        (*function.inputs, *function.outputs),
        (*function.placeholders, *function.results),
        strict=True,
    )
    for port, node in ports:
        if port.name not in buckets or node is None:
            continue
        bucket = buckets[port.name]
        wanted = {FLAT: bucket.flat_dtype, FULL: bucket.read_dtype, ACCUMULATED: bucket.grad_dtype}
        if val(node).dtype != wanted.get(port.kind, val(node).dtype):
            yield _told(name, node, f"holds {port.kind} '{port.name}'", wanted[port.kind])


def _reduced(
    program: Program, buckets: dict[str, Bucket], name: str, function: GraphFunction
) -> Iterator[str]:
    for port, node in zip(function.outputs, function.results, strict=True):
        if port.kind not in GRADIENTS:
            continue
        wanted = reduce_dtype(program, buckets[port.name])
        for step in _way_back(node):
            if step.target is not collectives.wait and val(step).dtype != wanted:
                yield _told(name, step, f"reduces bucket '{port.name}'", wanted)


def _way_back(node: Node | None) -> Iterator[Node]:
    """Yield the collectives that lead to a bucket's gradient, the last one first."""
    while node is not None and (node.target in WAYS or uncast(node) is not node):
        if node.target in WAYS:
            yield node
        node = node.all_input_nodes[0]


def _read(program: Program, name: str, function: GraphFunction) -> Iterator[str]:
    for fqn, node in function.named(PARAM).items():
        wanted = program.params[fqn].read_dtype
        if val(node).dtype != wanted:
            yield f"{name}: reads parameter '{fqn}' in {val(node).dtype} and must in {wanted}"
    loss = function.result(LOSS)
    if loss is not None and program.precision is not None and val(loss).dtype.itemsize < 4:
        yield _told(name, loss, "gives the loss", torch.float32)


def _told(name: str, node: Node, does: str, wanted: torch.dtype) -> str:
    where = f"{name}: {node.target} in {origin(node)}"
    return f"{where}: {does} in {val(node).dtype} and must in {wanted}"
