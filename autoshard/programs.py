"""The programs of one model under one plan: how they are compiled, and what decides them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.fx import GraphModule

from autoshard.cache.digest import Opaque
from autoshard.cache.key import model_parts, program_key
from autoshard.cache.store import Key
from autoshard.diagnostics import PassError, VerifyError
from autoshard.frontend import Compiled, capture_plan, compile_plan
from autoshard.ir.fake_model import without_values
from autoshard.ir.program import Program
from autoshard.ir.save import captured_bytes
from autoshard.ir.save_values import SaveError
from autoshard.plan import Plan
from autoshard.proof.static import static_rows
from autoshard.proof.verdict import Status
from autoshard.runtime.control import Control
from autoshard.runtime.obtain import Made, obtain, open_store

Loss = Callable[[object, object], torch.Tensor]


class Programs:
    """Gives the ranks of ``control`` the programs of ``model``; keeps no value of it alive."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        loss: Loss | None,
        world: int | None,
        control: Control,
        cache: bool | str | Path,
    ) -> None:
        """Look at the model; ``world`` is the number of processes that were started."""
        self._plan, self._loss, self._world = plan, loss, world
        self._control, self._store = control, open_store(cache)
        self._label = type(model).__name__
        is_keyed = self._store is not None or control.size > 1
        self._parts = _parts(model, loss) if is_keyed else ""
        self._twin = without_values(model)

    def first(self, model: nn.Module, example: object, verify: bool) -> Made:
        """Return the training program for ``example``, compared with ``model`` and proved.

        One rank does that for all: the ranks' programs are equal.
        """
        is_first = self._control.rank == 0
        captured = self._capture(model, example, True)
        needs = frozenset({"compared", "proved"} if verify else {"compared"})

        def compile() -> Made:
            compiled = self._compile(model, example, captured, compare=is_first)
            proof = _proved(compiled) if verify and is_first else ()
            lines = (_capture_note(compiled.program), *proof)
            return Made(compiled.program, needs if is_first else frozenset(), lines)

        return obtain(self._control, self._store, self._key(example, captured), compile, needs)

    def more(self, batch: object, training: bool) -> Program:
        """Return the program for a batch of other shapes, or for evaluation."""
        captured = self._capture(self._twin, batch, training)

        def compile() -> Made:
            return Made(self._compile(self._twin, batch, captured).program)

        return obtain(self._control, self._store, self._key(batch, captured), compile).program

    def graph(self, example: object, until: str, stage: int) -> GraphModule:
        """Return the graph of a stage as it is after a pass or a group; compiles on this rank."""
        shown = compile_plan(
            self._twin, self._plan, example, self._loss, world_size=self._world, until=until
        )
        return _show(shown.program, until, stage)

    def _capture(self, model: nn.Module, batch: object, training: bool) -> Program:
        """Return this rank's own capture; if it fails on any rank, stop on all.

        Every start and every rank captures: no look at a model shows all that its forward reads.
        """
        return self._control.together(
            lambda: capture_plan(
                model, self._plan, batch, self._loss, world_size=self._world, training=training
            )
        )

    def _compile(
        self, model: nn.Module, batch: object, captured: Program, compare: bool = False
    ) -> Compiled:
        return compile_plan(
            model,
            self._plan,
            batch,
            self._loss,
            world_size=self._world,
            training=captured.training,
            compare=compare,
            captured=captured,
        )

    def _key(self, batch: object, captured: Program) -> Key | str:
        """Return the key of the program that a capture leads to, or why there is none."""
        if isinstance(self._parts, str):
            return self._parts
        try:
            graph = captured_bytes(captured)
            given = (self._plan, batch, self._world, captured.training)
            return program_key(self._label, self._parts, graph, *given)
        except SaveError as error:
            return error.diagnostics[0].message
        except Opaque as error:
            return f"the batch holds {error}"
        except Exception as error:  # as of a schedule's file that can't be read
            return f"looking at plan and batch raised {type(error).__name__}"


def _parts(model: nn.Module, loss: Loss | None) -> dict[str, str] | str:
    """Return the key's ingredients that the user's code decides, or why there are none."""
    try:
        return model_parts(model, loss)
    except Opaque as error:
        return f"the model or the loss holds {error}"
    except Exception as error:  # attributes of a user's object may do anything when looked at
        return f"looking at the model raised {type(error).__name__}"


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
