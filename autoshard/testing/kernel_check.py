"""Are the compiled kernels that a program calls equal to their references, on random values?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autoshard.ir.program import Program
from autoshard.ops import add_layer_norm, add_rms_norm
from autoshard.ops import bias_dropout_add_layer_norm as dropout_norm
from autoshard.ops.dropout import DropoutArgs
from autoshard.ops.library import NAMESPACE, bound
from autoshard.ops.one_rank import OneRank
from autoshard.proof.verdict import Row, Status

ours = torch.ops.autoshard
ROWS, HIDDEN, EPS = 6, 32, 1e-5
Given = Callable[[torch.dtype], tuple]
# Where the dropout of the check draws: seed 1, step 2, one sample in each row.
PLACE = DropoutArgs(None, torch.tensor([1, 2, 0]), 0.3, 5, batch_dim=0)[1:]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def kernel_row(program: Program) -> Row:
    """Return the row of the kernels: those of the program's own operators that run compiled code.

    Operators of ATen are trusted; ours that are written with them are part of the numbers.
    """
    used = sorted(_own_kernels(program), key=str)
    if not used:
        return Row("kernels", Status.CHECKED, "no operator of its own: ATen is trusted")
    unknown = [_name(op) for op in used if op not in GIVEN]
    wrong = [_name(op) for op in used if op in GIVEN and not _is_right(op)]
    if wrong:
        return Row("kernels", Status.WRONG, f"differ from their references: {', '.join(wrong)}")
    if unknown:
        return Row("kernels", Status.UNPROVEN, f"no reference here for {', '.join(unknown)}")
    names = ", ".join(map(_name, used))
    return Row("kernels", Status.CHECKED, f"equal to their references on random values: {names}")


def _own_kernels(program: Program) -> set[object]:
    """Return our operators that generated code runs by other code than their reference."""
    targets = {
        node.target
        for _, function in program.functions()
        for node in function.graph.nodes
        if getattr(node.target, "namespace", "") == NAMESPACE
    }
    return {op for op in targets if bound(op)[0] is not bound(op, "reference")[0]}


def _is_right(op: object) -> bool:
    return all(_runs_alike(op, dtype) for dtype in TOLERANCE)


def _runs_alike(op: object, dtype: torch.dtype) -> bool:
    """Tell whether what generated code calls for an operator gives what its reference gives."""
    given = GIVEN[op](dtype)
    (run, takes_comm), (reference, _) = bound(op), bound(op, "reference")
    comm = (OneRank(),) if takes_comm else ()
    return _close(run(*comm, *given), reference(*comm, *given), dtype)


def _name(op: object) -> str:
    return str(op).removeprefix("autoshard.").removesuffix(".default")


def _layer_norm(dtype: torch.dtype) -> tuple:
    return (*_values(dtype), EPS)


def _layer_norm_backward(dtype: torch.dtype) -> tuple:
    x, residual, weight, _ = _values(dtype)
    _, s, mean, rstd = add_layer_norm.reference_forward(*_layer_norm(dtype))
    return residual, x, s, mean, rstd, weight, True


def _rms_norm(dtype: torch.dtype) -> tuple:
    x, residual, weight, _ = _values(dtype)
    return x, residual, weight, EPS


def _rms_norm_backward(dtype: torch.dtype) -> tuple:
    x, residual, weight, _ = _values(dtype)
    _, s, rstd = add_rms_norm.reference_forward(*_rms_norm(dtype))
    return residual, x, s, rstd, weight


def _dropout_norm(dtype: torch.dtype) -> tuple:
    x, residual, weight, bias = _values(dtype)
    return x, bias, residual, weight, bias, EPS, *PLACE


def _dropout_norm_backward(dtype: torch.dtype) -> tuple:
    x, residual, weight, _ = _values(dtype)
    _, s, mean, rstd = dropout_norm.reference_forward(OneRank(), *_dropout_norm(dtype))
    return residual, x, s, mean, rstd, weight, True, True, *PLACE


def _values(dtype: torch.dtype) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((ROWS, HIDDEN), (ROWS, HIDDEN), (HIDDEN,), (HIDDEN,))
    return tuple(torch.randn(shape, generator=draw, dtype=dtype) for shape in shapes)


def _close(have: tuple, want: tuple, dtype: torch.dtype) -> bool:
    limit = TOLERANCE[dtype]
    return all(
        torch.allclose(a, b, rtol=limit, atol=limit) for a, b in zip(have, want, strict=True)
    )


# What each operator is called with.
GIVEN: dict[object, Given] = {
    ours.add_layer_norm.default: _layer_norm,
    ours.add_layer_norm_backward.default: _layer_norm_backward,
    ours.add_rms_norm.default: _rms_norm,
    ours.add_rms_norm_backward.default: _rms_norm_backward,
    dropout_norm.bias_dropout_add_layer_norm: _dropout_norm,
    dropout_norm.backward: _dropout_norm_backward,
}
