"""Inputs, float64 truths and tolerances for the tests of the fused norms."""

from dataclasses import dataclass

import torch
from torch import Tensor

from autoshard.ops import add_layer_norm, add_rms_norm, native

EPS = 1e-5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Half a unit in the last place, relative: what storing a result once may cost.
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# What float32 accumulation may cost, relative to the largest element.
ACCUMULATION = 2e-6


@dataclass(frozen=True)
class Case:
    """One problem: summands, parameters and the gradients that come in."""

    x: Tensor
    residual: Tensor
    weight: Tensor | None
    bias: Tensor | None
    dy: Tensor
    ds: Tensor | None


def make_case(
    rows: int,
    hidden: int,
    dtype: torch.dtype = torch.float32,
    *,
    affine: bool = True,
    offset: float = 0.0,
    spread: float = 1.0,
    device: str = "cpu",
) -> Case:
    """Return a random problem; ``offset`` and ``spread`` are mean and width of the summands."""
    torch.manual_seed(rows * 100_003 + hidden)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    def cast(value: Tensor) -> Tensor:
        return value.to(device, dtype)

    return Case(
        cast(draw(rows, hidden) * spread + offset),
        cast(draw(rows, hidden) * spread),
        cast(1 + draw(hidden) / 4) if affine else None,
        cast(draw(hidden) / 4) if affine else None,
        cast(draw(rows, hidden)),
        cast(draw(rows, hidden)),
    )


def run_layer_norm(case: Case) -> dict[str, Tensor]:
    """Return every result of add_layer_norm and its backward."""
    y, s, mean, rstd = add_layer_norm.forward(case.x, case.residual, case.weight, case.bias, EPS)
    dx, dweight, dbias = add_layer_norm.backward(
        case.dy, case.ds, s, mean, rstd, case.weight, case.bias is not None
    )
    return {"y": y, "s": s, "rstd": rstd, "dx": dx, "dweight": dweight, "dbias": dbias}


def run_rms_norm(case: Case) -> dict[str, Tensor]:
    """Return every result of add_rms_norm and its backward."""
    y, s, rstd = add_rms_norm.forward(case.x, case.residual, case.weight, EPS)
    dx, dweight = add_rms_norm.backward(case.dy, case.ds, s, rstd, case.weight)
    return {"y": y, "s": s, "rstd": rstd, "dx": dx, "dweight": dweight}


def layer_norm_truth(case: Case) -> dict[str, Tensor]:
    """Return the results in float64, from the sum as it was stored."""
    return _truth(run_layer_norm, case)


def rms_norm_truth(case: Case) -> dict[str, Tensor]:
    """Return the results in float64, from the sum as it was stored."""
    return _truth(run_rms_norm, case)


def _truth(run: object, case: Case) -> dict[str, Tensor]:
    def wide(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.double()

    total = (case.x + case.residual).double()
    return run(
        Case(
            total,
            torch.zeros_like(total),
            wide(case.weight),
            wide(case.bias),
            wide(case.dy),
            wide(case.ds),
        )
    )


def worst_excess(found: Tensor, truth: Tensor, accumulation: float = ACCUMULATION) -> float:
    """Return the largest error in units of what storage and accumulation allow; <= 1 is right."""
    if found.numel() == 0:
        return 0.0
    error = (found.double() - truth).abs()
    allowed = HALF_ULP[found.dtype] * truth.abs() + accumulation * truth.abs().max() + 1e-30
    return float((error / allowed).max())


def instruction_sets() -> list[str]:
    """Return the instruction sets of the CPU kernels, or one stand-in where they are not built."""
    module = native.CPU.module
    return ["reference"] if module is None else module.instruction_sets().split()
