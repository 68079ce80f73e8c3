"""Refuse, by name, what an exported program holds that our graphs can't: see each check."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.export.graph_signature import OutputKind
from torch.fx import Node

from autoshard.compat import AUTOCAST_REGION, ExportedProgram, has_autograd
from autoshard.diagnostics import CaptureError
from autoshard.ir.node_info import may_have_gradient
from autoshard.ir.user_line import span_of, user_line

_KNOWN_NAMESPACES = ("aten", "prims", "autoshard", "_operator")
_ODD_GRADIENTS = {
    "scale_grad_by_freq": "it would count the tokens of one micro-batch of one rank",
    "sparse": "gradients are dense here, as the buckets that hold them",
}


def check_program(
    exported: ExportedProgram,
    leaves: Sequence[str],
    path_of: Callable[[Node], str],
    needs_grad: bool,
) -> None:
    """Refuse dynamic shapes, batch statistics, lost gradients and written inputs."""
    for node in exported.graph.nodes:
        if node.op == "call_function":
            _check_node(node, path_of(node), needs_grad)
    _check_mutations(exported, leaves)


def check_regions(exported: ExportedProgram, path_of: Callable[[Node], str]) -> None:
    """Refuse control flow (torch.cond and its like); autocast regions are not of this kind."""
    for node in exported.graph.nodes:
        is_region = isinstance(node.target, torch._ops.HigherOrderOperator)
        if is_region and node.target is not AUTOCAST_REGION:
            path = path_of(node)
            where = f" in `{path}`" if path else ""
            message = f"control flow `{node.target}`{where}: ranks could take different ways"
            _refuse(node, message, "AS701", "choose with torch.where")


def check_constants(exported: ExportedProgram, model: nn.Module) -> None:
    """Refuse trainable tensors that reach the program as constants: they would get no gradient."""
    storages = {_storage(param): name for name, param in model.named_parameters()}
    for target, value in exported.constants.items():
        if not isinstance(value, torch.Tensor):
            continue
        name = storages.get(_storage(value))
        holder = target.removeprefix("model.").rpartition(".")[0]
        where = f" in `{holder}`" if holder and holder != "model" else ""
        if name is not None or value.requires_grad:
            what = f"parameter `{name}`" if name else "a trainable tensor that is no parameter"
            raise CaptureError(
                f"forward{where} reads {what} by way of a plain attribute, list or dict:"
                " its gradient would be lost",
                code="AS702",
                help="register it as an nn.Parameter (nn.ParameterList) and read it from there",
            )


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


def _check_node(node: Node, path: str, needs_grad: bool) -> None:
    where = f" in `{path}`" if path else ""
    if _has_symbols(node.meta.get("val")):
        message = f"a shape{where} depends on the values of a tensor"
        _refuse(node, message, "AS701", "pad or mask to a fixed shape")
    if _is_batch_statistics(node):
        message = f"batch statistics{where}: they would be those of one micro-batch of one rank"
        _refuse(node, message, "AS706", "use layer_norm or group_norm")
    if needs_grad and (option := _odd_gradient(node)):
        message = f"`{option}=True`{where}: {_ODD_GRADIENTS[option]}"
        _refuse(node, message, "AS706", f"leave out `{option}`")
    if needs_grad and _loses_gradient(node):
        message = f"operator `{node.target}`{where} has no registered autograd"
        _refuse(node, message, "AS705", "register one with torch.library.register_autograd")


def _refuse(node: Node, message: str, code: str, way_out: str) -> None:
    source = user_line(node.meta.get("stack_trace"))
    raise CaptureError(message, code=code, span=span_of(source), help=way_out)


def _has_symbols(value: object) -> bool:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    if isinstance(value, list | tuple):
        return any(map(_has_symbols, value))
    return isinstance(value, torch.Tensor) and any(
        isinstance(extent, torch.SymInt) for extent in value.shape
    )


def _is_batch_statistics(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or "batch_norm" not in str(node.target):
        return False
    given = _given(node)
    return given.get("training") is True or given.get("train") is True


def _odd_gradient(node: Node) -> str | None:
    """Return the option of an embedding that makes its gradient no sum over samples."""
    if not isinstance(node.target, torch._ops.OpOverload) or "embedding" not in str(node.target):
        return None
    given = _given(node)
    return next((option for option in _ODD_GRADIENTS if given.get(option) is True), None)


def _given(node: Node) -> dict[str, object]:
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def _loses_gradient(node: Node) -> bool:
    """Tell whether the op belongs to others, gets values with gradients and has no autograd."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.namespace in _KNOWN_NAMESPACES or has_autograd(node.target):
        return False
    return any(may_have_gradient(source.meta.get("val")) for source in node.all_input_nodes)


def _check_mutations(exported: ExportedProgram, leaves: Sequence[str]) -> None:
    """Refuse forwards that write: a flat program has no state to write back to."""
    inputs = exported.graph_signature.user_inputs
    names = dict(zip(inputs, leaves, strict=True))
    for spec in exported.graph_signature.output_specs:
        if spec.kind is OutputKind.USER_OUTPUT:
            continue
        name = names.get(spec.target) or str(spec.target).removeprefix("model.")
        if spec.kind is OutputKind.BUFFER_MUTATION:
            if _reads(exported, spec.target):
                raise CaptureError(
                    f"the model updates its buffer `{name}` in forward",
                    code="AS706",
                    help="update it outside the model, between steps",
                )
            continue
        kind = "its input" if spec.kind is OutputKind.USER_INPUT_MUTATION else "its parameter"
        raise CaptureError(
            f"the model writes into {kind} `{name}` in place",
            code="AS706",
            help="work on a copy: x = x.clone()",
        )


def _reads(exported: ExportedProgram, target: str) -> bool:
    """Tell whether anything reads the buffer; a cache that is only written is harmless."""
    specs = [s for s in exported.graph_signature.input_specs if s.target == target]
    names = {spec.arg.name for spec in specs}
    nodes = exported.graph.find_nodes(op="placeholder")
    is_read = any(node.users for node in nodes if node.name in names)
    return is_read or any(spec.persistent for spec in specs)
