"""How the inputs of a graph lie: what the model, the plan and earlier graphs say about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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
from autoshard.ir.infer import Axis, Value
from autoshard.ir.params import ParamSpec
from autoshard.ir.placement import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard
from autoshard.ir.program import Program


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
        return Shard(0) if axis.name == "dp" and leaf.is_split else REPLICATE
    if port.kind in (RNG, NORMALIZER):
        return REPLICATE
    if port.kind == FLAT:
        return Shard(0) if axis.name == "dp" else None
    if port.kind == TANGENT:
        return REPLICATE if port.name == "loss" else cotangent(axis, sent.get(port.name))
    return {SAVED: saved, BOUNDARY: received}[port.kind].get(port.name)


def _param_placement(spec: ParamSpec, axis: Axis) -> Placement:
    """Return how a parameter lies; where shapes are global, padding shows as a longer block."""
    placement = spec.placements.get(axis.name, REPLICATE)
    if axis.scale == 1 and spec.padded and isinstance(placement, Shard):
        return replace(placement, blocks=(spec.padded[placement.dim],))
    return placement


def cotangent(axis: Axis, placement: Value) -> Value:
    """Return how the gradient of a value lies that lies so.

    Over tp every sharded use of a replicated value goes through ``copy_to``, so its gradient is
    replicated; over dp each rank's samples add their own term.
    """
    if isinstance(placement, Replicate):
        return PARTIAL if axis.name == "dp" else REPLICATE
    return REPLICATE if isinstance(placement, Partial) else placement
