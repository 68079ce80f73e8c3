"""Capture: from a plain ``nn.Module``, a micro-batch and a loss to a Program of one forward graph.

    program = capture(model, {"input_ids": ids, "labels": ids}, mesh=Mesh.of(tp=2))

``torch.export`` (non-strict) runs the model once on fake tensors, so a model on the meta device is
fine and nothing is materialised. The program is for one (batch, sequence) signature: no symbolic
shapes. What can't be captured faithfully is refused by name; nothing is silently lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from autoshard.collector import collector_paused
from autoshard.compat import (
    ExportedProgram,
    FakeTensorMode,
    decompose,
    export_functional,
    fake_like,
)
from autoshard.diagnostics import CaptureError
from autoshard.ir.batch import Loss, batch_leaves, compute, leaf_specs, rebuild
from autoshard.ir.capture_guards import check_model, explain, watched
from autoshard.ir.compare import compare_with_eager
from autoshard.ir.custom_functions import CustomFunctions
from autoshard.ir.dropout_sites import replace_dropout, respell_inplace
from autoshard.ir.export_graph import MODEL, convert, module_path
from autoshard.ir.export_spelling import is_functional
from autoshard.ir.fake_model import faked, mode_of, param_table
from autoshard.ir.grad_regions import inline_grad_regions
from autoshard.ir.program import Program
from autoshard.ir.program_guards import check_constants, check_program, check_regions
from autoshard.mesh import Mesh


def capture(
    model: nn.Module,
    microbatch: object,
    loss: Loss | None = None,
    *,
    mesh: Mesh,
    training: bool = True,
    compare: bool = True,
) -> Program:
    """Return the program of ``model`` (and ``loss``) for one micro-batch of one dp rank.

    Without ``loss`` the model's own loss is used: ``output.loss``, ``output["loss"]`` or an output
    that is a 0-d tensor. An eval program of a model without a loss gives the output's leaves. With
    ``compare`` loss and gradients are compared with the eager model where it fits in memory.

    Raises CaptureError.
    """
    check_model(model, training)
    leaves = batch_leaves(microbatch)
    params = param_table(model)
    exported, found = _export(model, microbatch, leaves, loss, training)
    if training and found.kind != "loss":
        raise CaptureError(
            f"{type(model).__name__} returned no loss, but {_described(found.names)}",
            code="AS708",
            help="give loss= (a function of output and batch), or let the model return its loss",
        )
    check_program(exported, tuple(leaves), module_path, training)
    check_constants(exported, model)
    converted = convert(exported, params, tuple(leaves), found.kind, found.names)
    replace_dropout(converted.function, converted.mode)
    program = Program(
        mesh=mesh,
        params=params,
        leaves=leaf_specs(leaves),
        training=training,
        forward=converted.function,
        constants=converted.constants,
    )
    if compare:
        program.compared = compare_with_eager(program, model, microbatch, loss)
    return program


@dataclass
class _Found:
    """What the model turned out to return while it was traced."""

    kind: str = ""
    names: tuple[str, ...] = ()


class _Whole(nn.Module):
    """The model and its loss as one module of flat tensor arguments."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        microbatch: object,
        names: tuple[str, ...],
        found: _Found,
        check: Callable[[], None],
    ) -> None:
        super().__init__()
        setattr(self, MODEL, model)
        # In a list, so that a loss that is a module does not become part of the model.
        self._held = [loss, microbatch, names, found, check]

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss, microbatch, names, found, check = self._held
        batch = rebuild(microbatch, dict(zip(names, values, strict=True)))
        model = getattr(self, MODEL)
        try:
            found.kind, results = compute(model, loss, batch)
            check()
        except Exception as error:
            # Here, not outside: torch prints its partial graph when its own errors pass through.
            raise explain(error, model) from error
        found.names = tuple(results)
        return tuple(results.values())


def _described(names: tuple[str, ...]) -> str:
    listed = ", ".join(f"`{name}`" for name in names)
    return listed or "no tensor at all"


@collector_paused()
def _export(
    model: nn.Module,
    microbatch: object,
    leaves: Mapping[str, torch.Tensor],
    loss: Loss | None,
    training: bool,
) -> tuple[ExportedProgram, _Found]:
    """Trace the model on fakes and return the functional program and what it returns."""
    found, functions = _Found(), CustomFunctions()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # One fake per leaf: the same tensor given twice must not become one input.
    values = tuple(fake_like(value, fake) for value in leaves.values())
    try:
        with faked(model, fake), mode_of(model, training), watched(model, functions) as check:
            whole = _Whole(model, loss, microbatch, tuple(leaves), found, check)
            whole.training = training
            exported = export_functional(whole, values)
        functions.check()
        inline_grad_regions(exported.graph_module)
        check_regions(exported, module_path)
        respell_inplace(exported.graph_module)
        if not is_functional(exported.graph):
            exported = decompose(exported)
        return exported, found
    except Exception as error:
        raise explain(error, model) from error
