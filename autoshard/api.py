"""The public functions: where plan, compiler and run-time meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from autoshard.dsl.load import load, load_file
from autoshard.dsl.printer import to_text
from autoshard.dsl.resolve import resolve
from autoshard.frontend import compile_plan
from autoshard.ir.batch import batch_leaves, rebuild, share_leaves
from autoshard.ir.evaluate import model_tensors
from autoshard.ir.facts import describe
from autoshard.ir.promote import promote_values
from autoshard.plan import Plan
from autoshard.programs import Programs
from autoshard.runtime.engine import Engine, Setup
from autoshard.runtime.init import Init
from autoshard.runtime.start import (
    choose_device,
    connect,
    launched_world,
    require_processes,
)
from autoshard.source import Source
from autoshard.testing.equivalence import held_values
from autoshard.testing.lockstep import StepRecord, run_lockstep

Loss = Callable[[object, object], torch.Tensor]
Leaves = Mapping[str, torch.Tensor]


def parallelize(
    model: nn.Module,
    plan: str | Path | Plan,
    *,
    example: object,
    loss: Loss | None = None,
    init: Init | None = None,
    verify: bool = True,
    cache: bool | str | Path = True,
) -> Engine:
    """Return the engine that trains ``model`` by ``plan`` on this rank.

    ``plan`` is a file, the text of one, or a Plan. ``example`` is a local batch: dict or tuple of
    tensors; the engine computes on the kind of device they lie on. ``loss(output, batch)`` gives a
    0-d tensor; without it the model's own loss is used. A model on the meta device needs ``init``,
    a function ``(name, tensor)`` that fills tensors in place, or a state dict loaded before the
    first step. Under torchrun every rank calls this; ranks connect once the plan is known to fit
    the model and their number. Rank 0 then compiles for all, and proves types, erasure and order of
    the program (see ``autoshard verify``): one that is wrong is refused; ``verify=False`` skips
    that. Programs are kept on disk with what was proved of them and found again while model, plan,
    shapes and versions stay; ``cache`` is a folder, or False for none. Raises an AutoshardError
    that says where, why and what to do.
    """
    source = read_plan(plan)
    world = launched_world()
    resolved = resolve(source, describe(model), world)
    resolved.require_executable()
    require_processes(resolved.mesh, world, source.span("mesh"))
    device = choose_device(batch_leaves(example))
    tensors = model_tensors(model)
    control = connect(device)
    programs = Programs(model, source, loss, world, control, cache)
    first = programs.first(model, example, verify)
    setup = Setup(
        plan_text=to_text(source),
        micro_batch_size=resolved.micro_batch_size,
        num_microbatches=resolved.num_microbatches,
        compile=programs.more,
        graph=partial(programs.graph, example),
        names=tuple(model.state_dict()),
        batch_span=source.span("batch"),
        init=init,
        notes=first.lines,
        optimizer=source.assume.optimizer or "adamw",
    )
    return Engine(setup, first.program, example, tensors, control, device)


def lockstep(
    model: nn.Module,
    plan: str | Path | Plan,
    batches: Sequence[object],
    *,
    loss: Loss | None = None,
    max_norm: float | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[StepRecord, ...]:
    """Train ``model`` by ``plan`` on virtual ranks in this process; return what each step computed.

    ``batches[step]`` is the global batch, cut over data parallel ranks on dim 0. ``dtype`` promotes
    the captured model, to float64 for exact comparisons. AdamW steps follow the gradients; nothing
    is launched, and the model itself is left as it is.
    """
    source = read_plan(plan)
    count = resolve(source, describe(model)).mesh.size("dp")
    shares = [share_leaves(batch_leaves(b), count) for b in batches]
    example = rebuild(batches[0], shares[0][0])
    compiled = compile_plan(model, source, example, loss, dtype=dtype, executable=True)
    values = held_values(model, compiled.program, dtype)
    cut = [[promote_values(leaves, dtype) for leaves in step] for step in shares]
    return run_lockstep(compiled.program, values, cut, max_norm=max_norm)


def read_plan(plan: str | Path | Plan) -> Plan:
    """Return the plan that a file, a text or a Plan gives."""
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, str) and "\n" in plan:
        return load(Source("plan", plan)).require()
    return load_file(plan).require()
