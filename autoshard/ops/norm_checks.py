"""Argument checks and shape rules shared by the fused normalisation ops."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoshard.diagnostics import OperatorError


def behind(check: Callable[..., None], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` with its arguments checked first: what an op does, called from anywhere.

    Generated code calls ``run`` itself; the op's fake checked the same arguments when the graph
    was made, and their shapes and dtypes are part of the program.
    """

    def checked(*args: Any) -> Any:
        check(*args)
        return run(*args)

    return checked


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of mean and rstd: float64 for float64 inputs, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def statistics_shape(x: Tensor) -> list[int]:
    """Return the shape of mean and rstd: that of ``x`` with the last dimension 1."""
    return [*x.shape[:-1], 1]


def check_sum(op: str, x: Tensor, residual: Tensor) -> None:
    """Raise OperatorError unless the two summands have one shape, dtype and device."""
    if x.dim() < 1 or x.shape[-1] == 0:
        raise OperatorError(f"{op} normalises the last dimension, but x is {_show(x)}")
    if not x.is_floating_point():
        raise OperatorError(f"{op} needs a floating-point x, found {_show(x)}")
    if x.shape != residual.shape:
        raise OperatorError(
            f"{op} adds without broadcasting: x is {_show(x)}, residual is {_show(residual)}; "
            "expand the smaller one first"
        )
    _check_same_kind(op, "residual", x, residual)


def check_parameter(op: str, name: str, x: Tensor, parameter: Tensor | None) -> None:
    """Raise OperatorError unless a weight or bias is one number for each hidden element."""
    if parameter is None:
        return
    if parameter.shape != x.shape[-1:]:
        raise OperatorError(
            f"{op} needs a {name} of shape [{x.shape[-1]}] for x {_show(x)}, "
            f"found {_show(parameter)}"
        )
    if parameter.device != x.device:
        raise OperatorError(f"{op}: {name} is on {parameter.device}, x on {x.device}")
    if parameter.dtype not in (x.dtype, torch.float32):
        raise OperatorError(
            f"{op} takes a {name} of x's dtype {x.dtype} or torch.float32, found {parameter.dtype}"
        )


def check_same_dtype(op: str, name: str, one: Tensor | None, of: str, two: Tensor | None) -> None:
    """Raise OperatorError when two parameters are both there with different dtypes."""
    if one is not None and two is not None and one.dtype != two.dtype:
        raise OperatorError(f"{op}: {name} is {one.dtype} but {of} is {two.dtype}")


def check_gradient(op: str, name: str, s: Tensor, gradient: Tensor | None) -> None:
    """Raise OperatorError unless an incoming gradient looks like the sum it belongs to."""
    if gradient is None:
        return
    if gradient.shape != s.shape:
        raise OperatorError(f"{op}: {name} is {_show(gradient)}, s is {_show(s)}")
    _check_same_kind(op, name, s, gradient)


def check_statistics(op: str, name: str, s: Tensor, value: Tensor) -> None:
    """Raise OperatorError unless saved statistics have the shape and dtype of forward's."""
    if list(value.shape) != statistics_shape(s) or value.dtype != statistics_dtype(s.dtype):
        raise OperatorError(
            f"{op}: {name} is {_show(value)}, which does not belong to s {_show(s)}"
        )


def _check_same_kind(op: str, name: str, x: Tensor, other: Tensor) -> None:
    if x.dtype != other.dtype:
        raise OperatorError(f"{op}: x is {x.dtype} but {name} is {other.dtype}; cast one first")
    if x.device != other.device:
        raise OperatorError(f"{op}: x is on {x.device} but {name} is on {other.device}")


def _show(value: Tensor) -> str:
    name = str(value.dtype).removeprefix("torch.").replace("float", "f")
    return f"{name}{list(value.shape)}"
