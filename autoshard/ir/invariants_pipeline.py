"""The invariants of stages, joint graphs and phases, each a function that raises VerifyError."""

from __future__ import annotations

from collections import Counter
from functools import cache

import torch
from torch._ops import OpOverload
from torch.fx import Node

from autoshard.diagnostics import VerifyError
from autoshard.ir.aliases import is_cheap, view_base
from autoshard.ir.graph_function import (
    BOUNDARY,
    BUFFER,
    GRAD,
    LOSS,
    PARAM,
    SAVED,
    TANGENT,
    GraphFunction,
    Port,
)
from autoshard.ir.node_info import info, origin
from autoshard.ir.program import Program, Stage
from autoshard.ops.library import NAMESPACE, spec


def check_staged(program: Program) -> None:
    """Check that values cross from each stage to the next one only, and that homes are true."""
    given: dict[str, object] = {}
    for stage in program.stages:
        forward = stage.forward
        for name, node in forward.named(BOUNDARY).items():
            if name not in given:
                raise VerifyError(
                    f"stage {stage.index} reads `{name}`, which stage {stage.index - 1} "
                    "doesn't send"
                )
            sent, read = given.pop(name), node.meta["val"]
            if (sent.shape, sent.dtype) != (read.shape, read.dtype):
                raise VerifyError(
                    f"`{name}` is sent as {tuple(sent.shape)} but stage {stage.index} reads "
                    f"{tuple(read.shape)}"
                )
        _nothing_unread(stage, given)
        given = {n: node.meta["val"] for n, node in forward.named_results(BOUNDARY).items()}
    if given:
        raise VerifyError(f"the last stage sends `{next(iter(given))}`, nobody reads it")
    _check_homes(program)


def _nothing_unread(stage: Stage, given: dict[str, object]) -> None:
    if given:
        raise VerifyError(
            f"stage {stage.index - 1} sends `{next(iter(given))}`, stage {stage.index} "
            "doesn't read it"
        )


def _check_homes(program: Program) -> None:
    read = {stage.index: set(stage.forward.inputs) for stage in program.stages}
    for entry in program.params:
        port = Port(BUFFER if entry.is_buffer else PARAM, entry.fqn)
        used = tuple(index for index, ports in read.items() if port in ports)
        if used != entry.homes:
            raise VerifyError(
                f"`{entry.fqn}` is used by stages {list(used)} but its homes are "
                f"{list(entry.homes)}{used_in(program, entry.fqn)}"
            )


def used_in(program: Program, fqn: str) -> str:
    """Return where a parameter's module computes, as the end of a message; "" where it doesn't."""
    path = fqn.rpartition(".")[0]
    nodes = [node for _, function in program.functions() for node in function.graph.nodes]
    own = [n for n in nodes if info(n).path == path and info(n).source and not info(n).role]
    node = next((n for n in own if info(n).span is not None), own[0] if own else None)
    return "" if node is None else f": %{node.name} in {origin(node)}"


def check_joint(program: Program) -> None:
    """Check one gradient per trained parameter and boundary value, of the value's own shape."""
    for stage in program.stages:
        if stage.joint is None:
            raise VerifyError(f"stage {stage.index} has no joint graph")
        _check_gradient_ports(program, stage, stage.joint)
    for earlier, later in zip(program.stages, program.stages[1:], strict=False):
        sent = set(later.joint.named_results(TANGENT))
        read = {name for name in earlier.joint.named(TANGENT) if name != "loss"}
        if sent != read:
            raise VerifyError(
                f"stage {later.index} sends gradients of {sorted(sent)}, "
                f"stage {earlier.index} reads {sorted(read)}"
            )


def _check_gradient_ports(program: Program, stage: Stage, joint: GraphFunction) -> None:
    where = f"stage {stage.index}"
    counts = Counter(port for port in joint.outputs if port.kind in (GRAD, TANGENT))
    twice = [str(port) for port, count in counts.items() if count > 1]
    if twice:
        raise VerifyError(f"{where} has two outputs {twice[0]}")
    for kind, source in ((GRAD, PARAM), (TANGENT, BOUNDARY)):
        values = stage.forward.named(source)
        for name, node in joint.named_results(kind).items():
            if name not in values:
                raise VerifyError(f"{where} has a gradient of `{name}`, which it doesn't read")
            if node.meta["val"].shape != values[name].meta["val"].shape:
                raise VerifyError(
                    f"{where}: gradient of `{name}` is {tuple(node.meta['val'].shape)}, "
                    f"the value {tuple(values[name].meta['val'].shape)}"
                )
            if kind == GRAD and not program.params[name].requires_grad:
                raise VerifyError(f"{where} has a gradient of `{name}`, which is frozen")
    ends = [port for port in joint.outputs if port.kind == LOSS]
    if program.training and ends and joint.node(TANGENT, "loss") is None:
        raise VerifyError(f"{where} gives the loss but takes no seed for it")


def check_phased(program: Program) -> None:
    """Check that F + I + W is the joint graph and that I reads nothing of W."""
    for stage in program.stages:
        if "F" not in stage.phases:
            raise VerifyError(f"stage {stage.index} has no phase F")
        _check_saved(stage)
        if stage.joint is not None:
            _check_operations(stage)


def _check_saved(stage: Stage) -> None:
    kept: set[str] = set()
    for phase in ("F", "I", "W"):
        function = stage.phases.get(phase)
        if function is None:
            continue
        missing = sorted(set(function.named(SAVED)) - kept)
        if missing:
            raise VerifyError(
                f"stage {stage.index}: {phase} reads `{missing[0]}`, which no earlier phase keeps"
            )
        kept |= set(function.named_results(SAVED))


def _check_operations(stage: Stage) -> None:
    phases = (stage.phases[p] for p in ("F", "I", "W") if p in stage.phases)
    split = sum((_operations(function) for function in phases), Counter())
    whole = _operations(stage.joint)
    if split != whole:
        op = next(op for op in (split | whole) if split[op] != whole[op])
        raise VerifyError(
            f"stage {stage.index}: the phases have {split[op]} of {op}, the joint graph {whole[op]}"
        )


def _operations(function: GraphFunction) -> Counter[object]:
    """Count torch's operations that compute; storage passes add only views, zeros and ours."""
    computing = [node for node in function.graph.nodes if _is_counted(node.target)]
    return Counter(n.target for n in computing if not is_cheap(n) and not _casts_gathered(n))


@cache
def _is_counted(op: object) -> bool:
    is_torch = isinstance(op, OpOverload) and op.namespace != NAMESPACE
    return is_torch and op is not torch.ops.aten.new_zeros.default


def _casts_gathered(node: Node) -> bool:
    """Tell whether ``node`` casts what came from other ranks: of a parameter it was cheap."""
    if node.target is not torch.ops.aten._to_copy.default:
        return False
    return spec(view_base(node.args[0]).target) is not None
