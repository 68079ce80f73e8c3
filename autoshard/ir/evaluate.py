"""Run a graph in plain torch on one rank, node by node: the reference that others are judged by.

    loss, grads = run_reference(program, model_tensors(model), batch)

Slow and simple on purpose: no generated code, no freeing, autograd makes the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx.node import map_arg

from autoshard.diagnostics import InternalError
from autoshard.ir.batch import batch_leaves
from autoshard.ir.fake_model import tensor_names
from autoshard.ir.graph_function import BATCH, BUFFER, LOSS, PARAM, RNG, GraphFunction
from autoshard.ir.program import Program
from autoshard.ops.communicator import Communicator
from autoshard.ops.library import spec
from autoshard.ops.one_rank import OneRank

Call = Callable[..., object]


@dataclass(frozen=True)
class Reference:
    """What one process computes for a program: loss or outputs, and a gradient per parameter.

    ``grads`` has an entry for each trainable parameter that the loss depends on.
    """

    loss: Tensor | None
    grads: dict[str, Tensor]
    outputs: dict[str, Tensor]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers, also non-persistent ones, by canonical name."""
    return {entry.names[0]: entry.value.detach() for entry in tensor_names(model)}


def run_reference(
    program: Program,
    tensors: Mapping[str, Tensor],
    batch: object,
    *,
    rng: tuple[int, int, int] = (0, 0, 0),
    call: Call | None = None,
    with_grads: bool = True,
) -> Reference:
    """Run the forward graph of ``program`` on real ``tensors`` and one batch of its signature.

    ``rng`` is seed, step and global index of the first sample; ``call(op, *args)`` may stand in
    for the execution of a node.
    """
    function = program.forward
    if function is None:
        raise InternalError("only a program with its whole forward graph has a reference run")
    values, leaves = _inputs(program, function, tensors, batch, rng, with_grads)
    with torch.set_grad_enabled(with_grads):
        results = evaluate(function, values, call)
    loss = results[0] if function.outputs[0].kind == LOSS else None
    grads = gradients(loss, leaves) if loss is not None and with_grads else {}
    if loss is not None:
        return Reference(loss.detach(), grads, {})
    pairs = zip(function.outputs, results, strict=True)
    return Reference(None, {}, {port.name: value.detach() for port, value in pairs})


def evaluate(
    function: GraphFunction,
    inputs: Sequence[Tensor],
    call: Call | None = None,
    comm: Communicator | None = None,
) -> tuple[Tensor, ...]:
    """Return the outputs of ``function``; our own ops run on ``comm`` (default: one rank)."""
    call = call or caller(comm or OneRank())
    values: dict = dict(zip(function.placeholders, inputs, strict=True))
    for node in function.graph.nodes:
        if node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = call(node.target, *args, **kwargs)
    return tuple(map_arg(function.results, values.__getitem__))


def caller(comm: Communicator) -> Call:
    """Return the function that executes one node on ``comm``."""

    def call(op: object, *args: object, **kwargs: object) -> object:
        ours = spec(op)
        return op(*args, **kwargs) if ours is None else ours.run(comm, *args, **kwargs)

    return call


def _inputs(
    program: Program,
    function: GraphFunction,
    tensors: Mapping[str, Tensor],
    batch: object,
    rng: tuple[int, int, int],
    with_grads: bool,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the values of the input ports, and of these the parameters that want a gradient."""
    given = batch_leaves(batch)
    trained: dict[str, Tensor] = {}
    values = []
    for port in function.inputs:
        if port.kind == PARAM:
            value = tensors[port.name].detach()
            if with_grads and program.params[port.name].requires_grad:
                value = trained[port.name] = value.clone().requires_grad_()
        elif port.kind == BUFFER:
            found = program.constants.get(port.name)
            value = tensors[port.name] if found is None else found
        elif port.kind == BATCH:
            value = given[port.name]
        elif port.kind == RNG:
            value = torch.tensor(rng, dtype=torch.int64)
        else:
            raise InternalError(f"a captured graph has no input {port}")
        values.append(value)
    return values, trained


def gradients(loss: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of each leaf that the loss depends on."""
    if not loss.requires_grad:
        return {}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {name: g for name, g in zip(leaves, found, strict=True) if g is not None}
