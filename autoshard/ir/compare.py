"""Compare a captured program with the eager model: loss and every gradient, dropout off.

"Off" means that every element is kept: the model runs as it is, its generator draws ones, and our
dropout keeps everything, so both scale by 1 / (1 - p) alike and the user's model is not touched.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.diagnostics import CaptureError
from autoshard.ir.batch import Loss, batch_leaves, compute, rebuild
from autoshard.ir.evaluate import Reference, caller, gradients, model_tensors, run_reference
from autoshard.ir.fake_model import kept_attributes, mode_of, swapped, tensor_names
from autoshard.ir.graph_function import GraphFunction
from autoshard.ir.program import Program
from autoshard.ops.dropout import DropoutArgs, dropout
from autoshard.ops.one_rank import OneRank

# Largest relative difference that rounding explains: the same operators run in the same order.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}
# Roundings of the largest gradient that one that is truly zero may be off by.
ROUNDING = 16
# Beyond this the comparison would cost more than it tells.
MOST_BYTES = 4 * 2**30

aten = torch.ops.aten


@dataclass(frozen=True)
class CompareReport:
    """How far a captured program is from the eager model, or why it was not compared."""

    reason: str = ""  # why not; empty when it was compared
    loss: float = 0.0  # relative difference
    gradient: float = 0.0  # the largest one over all parameters
    worst: str = ""  # the parameter that has it
    tolerance: float = 0.0

    @property
    def was_compared(self) -> bool:
        """Tell whether there was a comparison."""
        return not self.reason

    def __str__(self) -> str:
        if self.reason:
            return f"capture not compared: {self.reason}"
        text = f"capture compared with eager: loss {self.loss:.1e}, gradients {self.gradient:.1e}"
        return f"{text} (`{self.worst}`)" if self.worst else text


def compare_with_eager(
    program: Program, model: nn.Module, microbatch: object, loss: Loss | None = None
) -> CompareReport:
    """Return how far ``program`` is from ``model``; raise CaptureError when they differ."""
    reason = _why_not(program, model)
    if reason:
        return CompareReport(reason=reason)
    leaves = {name: _on_cpu(value) for name, value in batch_leaves(microbatch).items()}
    batch = rebuild(microbatch, leaves)
    tensors = {name: _on_cpu(value) for name, value in model_tensors(model).items()}
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        eager = _run_eager(model, batch, loss, program.training)
        ours = run_reference(program, tensors, batch, call=_keep_all, with_grads=program.training)
    report = _measure(ours, eager, program)
    _refuse_difference(report, ours, eager)
    return report


def difference(ours: Tensor, theirs: Tensor, floor: float = 0.0) -> float:
    """Return max |a - b| / (max |b| + floor): the one metric of equivalence.

    A gradient may be truly zero (a key bias under softmax): ``floor`` is a part of the model's
    largest gradient, such that tolerance x floor is rounding of that one.
    """
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.numel():
        return 0.0
    gap = (ours.double() - theirs.double()).abs().max().item()
    scale = theirs.double().abs().max().item() + floor
    if gap == 0.0 or scale == 0.0:
        return gap
    return float("inf") if gap != gap else gap / scale


def _why_not(program: Program, model: nn.Module) -> str:
    names = tensor_names(model)
    if any(entry.value.is_meta for entry in names):
        return "the parameters are on the meta device"
    needed = _bytes_needed(program)
    limit = min(MOST_BYTES, _free_bytes() // 2)
    if needed > limit:
        return f"it would take {needed / 2**30:.1f} GiB, more than {limit / 2**30:.1f} GiB"
    return ""


def _bytes_needed(program: Program) -> int:
    """Return the bytes of two sets of gradients and of all activations."""
    params = sum(_nbytes(s.shape, s.dtype) for s in program.params.trainable())
    return 3 * params + _activation_bytes(program.forward)


def _activation_bytes(function: GraphFunction) -> int:
    total = 0
    for node in function.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, Tensor):
            total += _nbytes(value.shape, value.dtype)
    return total


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _free_bytes() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return MOST_BYTES  # a system that does not tell


def _run_eager(model: nn.Module, batch: object, loss: Loss | None, training: bool) -> Reference:
    """Run the user's model as it is, on the CPU; its parameters and ``.grad`` stay untouched."""
    kept = torch.random.get_rng_state()
    try:
        with (
            swapped(model, _on_cpu) as tensors,
            mode_of(model, training),
            kept_attributes(model),
            _DrawOnes(),
        ):
            trained = {
                name: value
                for name, value in tensors.items()
                if isinstance(value, nn.Parameter) and value.requires_grad
            }
            kind, results = compute(model, loss, batch)
            value = results[""] if kind == "loss" else None
            grads = gradients(value, trained) if training and value is not None else {}
    finally:
        torch.random.set_rng_state(kept)
    outputs = {name: v.detach() for name, v in results.items()} if value is None else {}
    return Reference(None if value is None else value.detach(), grads, outputs)


class _DrawOnes(TorchDispatchMode):
    """Let every Bernoulli draw keep, so that dropout only scales."""

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func is aten.bernoulli_.float:
            return aten.fill_.Scalar(args[0], 1.0)
        return func(*args, **(kwargs or {}))


def _keep_all(op: object, *args: object, **kwargs: object) -> object:
    """Execute one node of the program with dropout that keeps everything."""
    if op is dropout:
        given = DropoutArgs(*args)
        return given.x * (torch.ones_like(given.x) / (1.0 - given.p))
    return _plain(op, *args, **kwargs)


_plain = caller(OneRank())


def _measure(ours: Reference, eager: Reference, program: Program) -> CompareReport:
    pairs = {"": (ours.loss, eager.loss)} if eager.loss is not None else {}
    pairs = pairs or {name: (ours.outputs[name], v) for name, v in eager.outputs.items()}
    loss = max((difference(a, b) for a, b in pairs.values()), default=0.0)
    dtypes = [s.dtype for s in program.params if s.dtype in TOLERANCE]
    dtype = max(dtypes, key=TOLERANCE.__getitem__, default=torch.float32)
    tolerance = TOLERANCE[dtype]
    largest = max((g.abs().max().item() for g in eager.grads.values() if g.numel()), default=0.0)
    names = dict.fromkeys((*eager.grads, *ours.grads))
    floor = ROUNDING * torch.finfo(dtype).eps / tolerance * largest
    gaps = {name: _gap(ours.grads.get(name), eager.grads.get(name), floor) for name in names}
    worst = max(gaps, key=gaps.__getitem__, default="")
    return CompareReport("", loss, gaps.get(worst, 0.0), worst, tolerance)


def _gap(ours: Tensor | None, eager: Tensor | None, floor: float) -> float:
    """Return the difference; a gradient that only one side has counts as zero on the other."""
    if ours is None or eager is None:
        only = eager if ours is None else ours
        return difference(torch.zeros_like(only), only, floor)
    return difference(ours, eager, floor)


def _refuse_difference(report: CompareReport, ours: Reference, eager: Reference) -> None:
    if report.loss <= report.tolerance and report.gradient <= report.tolerance:
        return
    if eager.loss is not None and not eager.loss.isfinite().all():
        raise CaptureError(
            f"the loss of the eager model is {eager.loss.item()} on the example batch",
            code="AS711",
            help="give a batch whose loss is finite: one that has samples, and a label that counts",
        )
    is_loss = report.loss > report.tolerance
    what = "loss" if is_loss else f"gradient of `{report.worst}`"
    gap = report.loss if is_loss else report.gradient
    values = ""
    if is_loss and eager.loss is not None:
        values = f": {ours.loss.item():.8g} captured, {eager.loss.item():.8g} eager"
    raise CaptureError(
        f"the captured program is not the eager model: the {what} differs by {gap:.1e}"
        f" (limit {report.tolerance:.0e}){values}",
        code="AS711",
        help="something in forward depends on more than its inputs (a counter, a random number,"
        " the values of a tensor); make it a function of the batch",
    )


def _on_cpu(value: Tensor) -> Tensor:
    return value.detach().cpu()
