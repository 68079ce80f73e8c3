"""From a model and a plan to a compiled Program: where capture, plan, compiler and passes meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.compiler.manager import Observer, compile_program
from autoshard.compiler.pass_base import Pass
from autoshard.compiler.pipeline import Pipeline
from autoshard.diagnostics import BatchError, Diagnostic, PlacementError, Remark
from autoshard.dsl.resolve import Resolved, resolve
from autoshard.ir.capture import capture
from autoshard.ir.compare import compare_with_eager
from autoshard.ir.facts import describe
from autoshard.ir.program import Program
from autoshard.ir.promote import promote
from autoshard.passes.fuse_add_layer_norm import FuseAddLayerNorm
from autoshard.passes.globalize_loss import GlobalizeLoss
from autoshard.passes.pipelines import default_pipeline
from autoshard.passes.propagate_placements import UNPROVEN
from autoshard.passes.shard_params import ShardParams
from autoshard.plan import Plan
from autoshard.proof.plain import PlainGraph, is_only_compared_fused
from autoshard.proof.types import check_types


@dataclass(frozen=True)
class Compiled:
    """A Program with what led to it."""

    program: Program
    resolved: Resolved
    remarks: tuple[Remark, ...]
    plain: PlainGraph | None = None  # the graph before its first parallel pass


def compile_plan(
    model: nn.Module,
    plan: Plan,
    batch: object,
    loss: Callable[..., torch.Tensor] | None = None,
    *,
    world_size: int | None = None,
    training: bool = True,
    until: str | None = None,
    pipeline: Pipeline | None = None,
    dtype: torch.dtype | None = None,
    compare: bool = False,
    executable: bool = False,
    observe: Observer | None = None,
    check: bool = True,
    captured: Program | None = None,
    strict: bool = False,
) -> Compiled:
    """Compile ``model`` for ``plan``; nothing is run and no process group is touched.

    ``batch`` holds one micro-batch, or the whole local batch of a data-parallel rank. ``until``
    names the pass or group to stop after, ``dtype`` promotes the captured graph (float64 for
    exact comparison), ``compare`` checks the capture against the eager model, ``executable``
    refuses settings that can't run yet. ``captured`` is an earlier capture of the same model and
    shapes to start from; it is copied. ``strict`` refuses a plan that has warnings, and operators
    without a placement rule.
    Raises an AutoshardError that names place and remedy.
    """
    resolved = resolve(plan, describe(model), world_size)
    if strict:
        resolved.require_no_warnings()
    if executable:
        resolved.require_executable()
    microbatch = first_microbatch(batch, resolved)
    if captured is None:
        program = capture(
            model, microbatch, loss, mesh=resolved.mesh, training=training, compare=compare
        )
    else:
        program = captured.fork(resolved.mesh)
        if compare:
            program.compared = compare_with_eager(program, model, microbatch, loss)
    if dtype is not None:
        program = promote(program, dtype)
    program.num_microbatches = resolved.num_microbatches
    program.compiler = plan.fuse.compile
    remarks: list[Remark] = []
    kept: list[PlainGraph] = []

    def watch(step: Pass, current: Program) -> None:
        if step.name == GlobalizeLoss.name:
            kept.append(PlainGraph.of(current))
        elif _is_named_rewrite(step, current):
            kept[:] = [PlainGraph.of(current, kept[0])]
        if observe is not None:
            observe(step, current)

    program = compile_program(
        program,
        resolved,
        pipeline or default_pipeline(),
        until=until,
        remarks=remarks,
        observe=watch,
        check=check,
    )
    if strict:
        require_rules(program, remarks)
    return Compiled(program, resolved, tuple(remarks), kept[0] if kept else None)


def capture_plan(
    model: nn.Module,
    plan: Plan,
    batch: object,
    loss: Callable[..., torch.Tensor] | None = None,
    *,
    world_size: int | None = None,
    training: bool = True,
) -> Program:
    """Return the capture that ``compile_plan`` of the same arguments takes as ``captured``.

    It is not compared with the eager model yet. Raises an AutoshardError.
    """
    resolved = resolve(plan, describe(model), world_size)
    microbatch = first_microbatch(batch, resolved)
    return capture(model, microbatch, loss, mesh=resolved.mesh, training=training, compare=False)


def _is_named_rewrite(step: Pass, program: Program) -> bool:
    """Tell whether a pass has just rewritten what only its own tests compare with the model."""
    if step.name == FuseAddLayerNorm.name:
        return is_only_compared_fused(program)
    return step.name == ShardParams.name and any(spec.copies for spec in program.params)


def require_rules(program: Program, remarks: Sequence[Remark]) -> None:
    """Raise for each operator, of forward or of backward, that the table has no rule for."""
    found = [r for r in remarks if r.kind == "missed" and r.message.startswith(UNPROVEN)]
    lines = [f"{r.message.removeprefix(UNPROVEN).strip()}, in `{r.where}`" for r in found]
    if not lines and program.stages and program.stages[0].phases:
        lines = list(check_types(program).unproven)
    if lines:
        raise PlacementError(
            Diagnostic(
                "AS408",
                f"no placement rule for {line}",
                help=("leave out `--strict`: it then runs whole on every rank, unproven",),
            )
            for line in lines
        )


def first_microbatch(batch: object, resolved: Resolved) -> object:
    """Return the first micro-batch of a batch: one micro-batch, a local or the global batch.

    Tensors are cut on dim 0; leaves of size 1 there and non-tensors go to every micro-batch.
    Raises BatchError when a tensor has another number of samples than the plan says.
    """
    size = resolved.micro_batch_size
    local = size * resolved.num_microbatches
    known = {size, local, local * resolved.mesh.size("dp")}

    def cut(path: tuple, leaf: object) -> object:
        if not _is_cut(leaf):
            return leaf
        if leaf.shape[0] not in known:
            raise BatchError(
                f"batch{pytree.keystr(path)} has {leaf.shape[0]} samples, "
                f"the plan says {size} x {resolved.num_microbatches}",
                span=resolved.plan.span("batch.micro_batch_size"),
                help=f"give {local} samples (or one micro-batch of {size})",
            )
        return leaf[:size]

    return pytree.tree_map_with_path(cut, batch)


def global_batch(batch: object, resolved: Resolved) -> object:
    """Return a global batch made of ``batch``, which may be a micro-batch or a local batch.

    Missing samples repeat the given ones, rolled along their second dimension so that no two
    micro-batches are the same.
    """
    wanted = resolved.micro_batch_size * resolved.num_microbatches * resolved.mesh.size("dp")

    def fill(leaf: object) -> object:
        if not _is_cut(leaf) or leaf.shape[0] >= wanted:
            return leaf
        copies = range(wanted // leaf.shape[0])
        rolled = [leaf.roll(copy, 1) if leaf.dim() > 1 else leaf for copy in copies]
        return torch.cat(rolled)

    return pytree.tree_map(fill, batch)


def _is_cut(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] > 1
