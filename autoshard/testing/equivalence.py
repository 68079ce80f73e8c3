"""Compare a compiled plan, in lock step, with the captured model on one process in float64.

Both sides are the captured graph with its float32 casts promoted: models that cast inside would
otherwise differ from themselves by 1e-7. The reference captures the *global* batch in one piece,
so micro-batching, loss normalisation and every axis of the mesh are all on the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autoshard.frontend import compile_plan
from autoshard.ir.batch import batch_leaves, share_leaves
from autoshard.ir.capture import capture
from autoshard.ir.evaluate import model_tensors, run_reference
from autoshard.ir.graph_function import PARAM
from autoshard.ir.program import Program
from autoshard.ir.promote import promote, promote_values
from autoshard.mesh import Mesh
from autoshard.plan import Plan
from autoshard.testing.lockstep import StepRecord, adamw, run_lockstep

TOLERANCE = 1e-10
FLOOR = 1e-6  # of the largest tensor of a kind: below that, a tensor counts as zero


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of one tensor, and the ratio of the two norms there."""

    what: str  # "loss", "grad h.0.ln_1.weight", "norm", "param ..."
    step: int
    error: float
    ratio: float  # ours / reference


@dataclass(frozen=True)
class Comparison:
    """All differences of a run, and both runs."""

    differences: tuple[Difference, ...]
    ours: tuple[StepRecord, ...]
    reference: tuple[StepRecord, ...]

    @property
    def worst(self) -> Difference:
        """Return the largest difference."""
        return max(self.differences, key=lambda d: d.error)

    def first_wrong(self, tolerance: float = TOLERANCE) -> Difference | None:
        """Return the first difference above ``tolerance``: loss, then gradients in model order."""
        return next((d for d in self.differences if not d.error <= tolerance), None)


def compare_plan(
    model: nn.Module,
    plan: Plan,
    batch: object,
    loss: Callable[..., Tensor] | None = None,
    *,
    steps: int = 2,
    max_norm: float | None = 1.0,
    dtype: torch.dtype = torch.float64,
    mutate: Callable[[Program], object] | None = None,
) -> Comparison:
    """Train ``steps`` steps both ways on the global ``batch`` and compare everything.

    ``mutate`` may break the compiled program first, to see that the comparison notices.
    """
    compiled = compile_plan(model, plan, batch, loss, dtype=dtype)
    if mutate is not None:
        mutate(compiled.program)
    reference = reference_run(model, batch, loss, steps=steps, max_norm=max_norm, dtype=dtype)
    return compare_compiled(compiled.program, model, batch, reference, max_norm, dtype)


def reference_run(
    model: nn.Module,
    batch: object,
    loss: Callable[..., Tensor] | None = None,
    *,
    steps: int = 2,
    max_norm: float | None = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[StepRecord, ...]:
    """Train the captured model on the whole ``batch`` in one process and record each step."""
    whole = promote(capture(model, batch, loss, mesh=Mesh(()), compare=False), dtype)
    values = promote_values(model_tensors(model), dtype)
    leaves = promote_values(batch_leaves(batch), dtype)
    read = whole.forward.named(PARAM)  # what no operator reads, no rank stores
    trained = {
        s.fqn: nn.Parameter(values[s.fqn].clone())
        for s in whole.params.trainable()
        if s.fqn in read
    }
    optimizer = adamw(trained.values())
    records = []
    for step in range(steps):
        held = {**values, **{name: p.detach() for name, p in trained.items()}}
        found = run_reference(whole, held, leaves, rng=(0, step, 0))
        for name, parameter in trained.items():
            parameter.grad = found.grads.get(name)
        grads = {name: grad.clone() for name, grad in found.grads.items()}
        norm = None
        if max_norm is not None:
            norm = nn.utils.clip_grad_norm_(trained.values(), max_norm)
        optimizer.step()
        params = {name: p.detach().clone() for name, p in trained.items()}
        records.append(StepRecord(found.loss, grads, norm, params))
    return tuple(records)


def compare_compiled(
    program: Program,
    model: nn.Module,
    batch: object,
    reference: Sequence[StepRecord],
    max_norm: float | None = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Comparison:
    """Run a compiled program in lock step and compare it with a reference run."""
    values = held_values(model, program, dtype)
    leaves = promote_values(batch_leaves(batch), dtype)
    shares = share_leaves(leaves, program.mesh.size("dp"))
    ours = run_lockstep(program, values, [shares] * len(reference), max_norm=max_norm)
    return Comparison(tuple(differences(ours, reference)), ours, tuple(reference))


def held_values(model: nn.Module, program: Program, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return what ``program`` stores of a model, by canonical name; floats as ``dtype``."""
    held = {name: v for name, v in model_tensors(model).items() if name in program.params}
    return promote_values(held, dtype)


def differences(ours: Sequence[StepRecord], reference: Sequence[StepRecord]) -> list[Difference]:
    """Return the relative difference of every loss, gradient, norm and parameter, in order.

    A tensor's error is max |a - b| / (max |b| + 1e-6 x the largest of its kind in the model), so
    that gradients that are truly zero (an attention's key bias) don't count. Nor do the parameters
    that they move: AdamW makes whole steps of such noise.
    """
    found: list[Difference] = []
    noise: set[str] = set()
    for step, (a, b) in enumerate(zip(ours, reference, strict=True)):
        found.append(_difference("loss", step, a.loss, b.loss, 0.0))
        found += _differences("grad", step, a.grads, b.grads)
        if b.norm is not None:
            found.append(_difference("norm", step, a.norm, b.norm, 0.0))
        noise |= _noise(b.grads)
        # Without a gradient nothing moves it, and no rank need store it.
        resting = b.params.keys() - b.grads.keys() - a.params.keys()
        names = b.params.keys() - noise - resting  # the reference trains no frozen ones
        kept = [{n: p for n, p in r.params.items() if n in names} for r in (a, b)]
        found += _differences("param", step, *kept)
    return found


def _noise(grads: Mapping[str, Tensor]) -> set[str]:
    """Return the names of gradients that count as zero beside the largest."""
    sizes = {name: grad.abs().max().item() for name, grad in grads.items() if grad.numel()}
    return {name for name, size in sizes.items() if size <= FLOOR * max(sizes.values())}


def _differences(
    kind: str, step: int, ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> list[Difference]:
    floor = FLOOR * max((v.abs().max().item() for v in reference.values() if v.numel()), default=0)
    missing = [
        Difference(f"{kind} {name}", step, float("inf"), 0.0)
        for name in sorted(set(reference) ^ set(ours))
    ]
    return missing + [
        _difference(f"{kind} {name}", step, ours[name], value, floor)
        for name, value in reference.items()
        if name in ours
    ]


def _difference(what: str, step: int, ours: Tensor, reference: Tensor, floor: float) -> Difference:
    if ours.shape != reference.shape:
        return Difference(what, step, float("inf"), 0.0)
    if not reference.numel():
        return Difference(what, step, 0.0, 1.0)
    scale = reference.abs().max().item() + floor
    gap = (ours - reference).abs().max().item()
    norm = reference.norm().item()
    ratio = ours.norm().item() / norm if norm else 1.0
    return Difference(what, step, gap / scale if scale else gap, ratio)
