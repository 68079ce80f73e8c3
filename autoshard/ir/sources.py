"""How the inputs of a graph lie: what the model, the plan and earlier graphs say about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoshard.ir.decide import Axis, Value
from autoshard.ir.graph_function import (
    BATCH,
    BOUNDARY,
    BUFFER,
    FLAT,
    NORMALIZER,
    PARAM,
    RNG,
    SAVED,
    TANGENT,
    Port,
)
from autoshard.ir.params import ParamSpec
from autoshard.ir.placement import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard
from autoshard.ir.program import Bucket, Program
from autoshard.mesh import covers


def source_placement(
    program: Program,
    axis: Axis,
    port: Port,
    received: Mapping[str, Value],
    sent: Mapping[str, Value],
    saved: Mapping[str, Value],
) -> Value:
    """Return the placement of an input, None when it is not known."""
    if port.name in program.constants:
        return REPLICATE
    if port.kind in (PARAM, BUFFER):
        if port.name in program.constants:
            return REPLICATE
        return _param_placement(program.params[port.name], axis)
    if port.kind == BATCH:
        leaf = next(leaf for leaf in program.leaves if leaf.name == port.name)
        return Shard(0) if axis.is_data and leaf.is_split else REPLICATE
    if port.kind in (RNG, NORMALIZER):
        return REPLICATE
    if port.kind == FLAT:
        return stored_placement(_bucket(program, port.name), axis)
    if port.kind == TANGENT:
        return REPLICATE if port.name == "loss" else cotangent(axis, sent.get(port.name))
    return {SAVED: saved, BOUNDARY: received}[port.kind].get(port.name)


def stored_placement(bucket: Bucket, axis: Axis) -> Value:
    """Return how a bucket lies as it is stored; None over tp, where each part lies its own way."""
    if not axis.is_data:
        return None
    return Shard(0) if bucket.axis and covers(bucket.axis, axis.name) else REPLICATE


def _bucket(program: Program, name: str) -> Bucket:
    return next(bucket for bucket in program.buckets if bucket.name == name)


def _param_placement(spec: ParamSpec, axis: Axis) -> Placement:
    """Return how a parameter lies; where shapes are global, padding shows as a longer block."""
    placement = spec.placements.get(axis.name, REPLICATE)
    is_longer = spec.padded is not None and not spec.is_widened
    if axis.scale == 1 and is_longer and isinstance(placement, Shard):
        return replace(placement, blocks=(spec.padded[placement.dim],))
    return placement


def cotangent(axis: Axis, placement: Value) -> Value:
    """Return how the gradient of a value lies that lies so.

    Over tp every sharded use of a replicated value goes through ``copy_to``, so its gradient is
    replicated; over dp each rank's samples add their own term.
    """
    if isinstance(placement, Replicate):
        return PARTIAL if axis.is_data else REPLICATE
    return REPLICATE if isinstance(placement, Partial) else placement
