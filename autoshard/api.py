"""The public functions: where plan, compiler and run-time meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.fx import GraphModule

from autoshard.diagnostics import PassError, VerifyError
from autoshard.dsl.load import load, load_file
from autoshard.dsl.printer import to_text
from autoshard.dsl.resolve import resolve
from autoshard.frontend import Compiled, compile_plan
from autoshard.ir.batch import batch_leaves, rebuild, share_leaves
from autoshard.ir.evaluate import model_tensors
from autoshard.ir.facts import describe
from autoshard.ir.fake_model import without_values
from autoshard.ir.program import Program
from autoshard.ir.promote import promote_values
from autoshard.plan import Plan
from autoshard.proof.static import static_rows
from autoshard.proof.verdict import Status
from autoshard.runtime.engine import Engine, Setup
from autoshard.runtime.init import Init
from autoshard.runtime.start import (
    choose_device,
    connect,
    launched_rank,
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
) -> Engine:
    """Return the engine that trains ``model`` by ``plan`` on this rank.

    ``plan`` is a file, the text of one, or a Plan. ``example`` is a local batch: dict or tuple of
    tensors; the engine computes on the kind of device they lie on. ``loss(output, batch)`` gives a
    0-d tensor; without it the model's own loss is used. A model on the meta device needs ``init``,
    a function ``(name, tensor)`` that fills tensors in place, or a state dict loaded before the
    first step. Under torchrun every rank calls this; ranks connect only once the plan is known to
    fit. Rank 0 then proves types, erasure and order of the program (see ``autoshard verify``) and
    refuses one that is wrong; ``verify=False`` skips that. Raises an AutoshardError that says
    where, why and what to do.
    """
    source = read_plan(plan)
    world = launched_world()
    resolved = resolve(source, describe(model), world)
    resolved.require_executable()
    require_processes(resolved.mesh, world, source.span("mesh"))
    device = choose_device(batch_leaves(example))
    tensors = model_tensors(model)

    # One rank compares with the eager model for all: their fingerprints are equal.
    is_first = launched_rank() == 0
    compiled = compile_plan(model, source, example, loss, world_size=world, compare=is_first)
    twin = without_values(model)  # the engine itself keeps no weight of the plain model alive

    def compile_more(batch: object, training: bool) -> Program:
        more = compile_plan(twin, source, batch, loss, world_size=world, training=training)
        return more.program

    def graph(until: str, stage: int) -> GraphModule:
        shown = compile_plan(twin, source, example, loss, world_size=world, until=until)
        return _show(shown.program, until, stage)

    proof = _proved(compiled) if verify and is_first else ()
    setup = Setup(
        plan_text=to_text(source),
        micro_batch_size=resolved.micro_batch_size,
        num_microbatches=resolved.num_microbatches,
        compile=compile_more,
        graph=graph,
        names=tuple(model.state_dict()),
        batch_span=source.span("batch"),
        init=init,
        notes=(_capture_note(compiled.program), *proof),
        optimizer=source.assume.optimizer or "adamw",
    )
    return Engine(setup, compiled.program, example, tensors, connect(device), device)


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


def _proved(compiled: Compiled) -> tuple[str, ...]:
    """Prove types, erasure and order; return their rows, or refuse a program that is wrong."""
    rows = static_rows(compiled.program, compiled.plain)
    wrong = [row for row in rows if row.status is Status.WRONG]
    if wrong:
        raise VerifyError(
            f"the compiled program is not the model: {wrong[0].link}: {wrong[0].summary}",
            notes=wrong[0].findings,
            help="please report this: the program is refused before anything is launched",
        )
    return tuple(
        f"{row.link:<10} {row.status.value} in {row.seconds:.1f} s: {row.summary}" for row in rows
    )


def _capture_note(program: Program) -> str:
    """Return how far the capture was compared with the eager model, for the report."""
    said = program.compared or "capture compared on rank 0 only"
    return f"capture    {str(said).removeprefix('capture ')}"


def _show(program: Program, until: str, stage: int) -> GraphModule:
    """Return the graph of a stage at the level that the program has come down to."""
    if program.forward is not None:
        return program.forward.module()
    if not 0 <= stage < len(program.stages):
        raise PassError(f"there is no stage {stage}: the plan has {len(program.stages)}")
    held = program.stages[stage]
    if held.phases:
        return held.phases["F"].module()
    return (held.joint or held.forward).module()
