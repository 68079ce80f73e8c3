"""Raise a program to float64, so that what two programs differ by is not rounding.

Hugging Face models cast to float32 inside, which float64 parameters alone do not undo.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from autoshard.compat import FakeTensorMode
from autoshard.ir.fakes import FakeMode, refake
from autoshard.ir.graph_function import GraphFunction
from autoshard.ir.params import ParamTable
from autoshard.ir.program import Program

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def promote(program: Program, dtype: torch.dtype = torch.float64) -> Program:
    """Return a copy of a captured ``program`` in which every float is of type ``dtype``.

    Parameters, buffers, constants, float leaves of the batch, casts and factories are raised.
    """
    params = tuple(replace(s, dtype=_raised(s.dtype, dtype)) for s in program.params)
    leaves = tuple(replace(leaf, dtype=_raised(leaf.dtype, dtype)) for leaf in program.leaves)
    constants = {name: v.to(_raised(v.dtype, dtype)) for name, v in program.constants.items()}
    forward, prelude = (
        None if function is None else _promoted(function, dtype)
        for function in (program.forward, program.prelude)
    )
    return replace(
        program,
        params=ParamTable(params),
        leaves=leaves,
        constants=constants,
        forward=forward,
        prelude=prelude,
        stages=[],
        holds=set(program.holds),
        journal=list(program.journal),
    )


def promote_values(
    values: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Return ``values`` with every float as ``dtype``; None leaves them as they are."""
    return {
        name: value if dtype is None else value.to(_raised(value.dtype, dtype))
        for name, value in values.items()
    }


def _promoted(function: GraphFunction, dtype: torch.dtype) -> GraphFunction:
    copy = function.clone()
    mode = FakeMode()
    for node in copy.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = _new_input(node.meta["val"], dtype, mode)
        elif node.op == "call_function":
            _promote_node(node, dtype, mode)
    return copy


def _new_input(value: torch.Tensor, dtype: torch.dtype, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        raised = _raised(value.dtype, dtype)
        return torch.empty_strided(value.shape, value.stride(), dtype=raised, device="cpu")


def _promote_node(node: Node, dtype: torch.dtype, mode: FakeTensorMode) -> None:
    node.args = map_aggregate(node.args, lambda a: _raised(a, dtype))
    node.kwargs = map_aggregate(node.kwargs, lambda a: _raised(a, dtype))
    if _makes_floats(node) and node.kwargs.get("dtype") is None:
        node.kwargs = {**node.kwargs, "dtype": dtype}
    refake(node, mode)


def _makes_floats(node: Node) -> bool:
    """Tell whether the node makes floats from nothing, of the default type unless told."""
    value = node.meta["val"]
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    is_factory = not node.all_input_nodes and "dtype" in names
    return is_factory and isinstance(value, torch.Tensor) and value.is_floating_point()


def _raised(value: object, dtype: torch.dtype) -> object:
    """Return ``dtype`` for a float type, its complex type for one, and anything else as it is."""
    if not isinstance(value, torch.dtype):
        return value
    return dtype.to_complex() if value.is_complex else dtype if value in _FLOATS else value
