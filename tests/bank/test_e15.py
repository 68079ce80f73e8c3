"""E15: an overflow on one rank only: all ranks skip together, and the scale falls on all."""

from __future__ import annotations

import pytest
import torch

from autoshard.diagnostics import AutoshardError
from autoshard.frontend import compile_plan
from autoshard.runtime.clip import clip_grad_norm
from autoshard.runtime.executor import Executable
from autoshard.runtime.gradients import Gradients
from autoshard.runtime.loss_scale import LossScaler
from autoshard.testing.equivalence import held_values
from autoshard.testing.lockstep import adamw, run_ranks
from autoshard.testing.models import tiny_mlp
from tests.bank.equal import read

PLAN = """
mesh {{ dp = 2 }}
batch {{ micro_batch_size = 2 }}
zero {{ stage = {stage}, param_persistence_threshold = 0KiB }}
precision {{ {precision} }}
"""
FP16 = "params = fp16, loss_scale = dynamic"
BAD_STEP, STEPS, FIRST_SCALE = 3, 6, 2.0**16


def ranks(stage: int, body, precision: str = FP16):
    """Run ``body(exe, leaves)`` on both ranks; ``leaves(step)`` is the rank's batch.

    At the bad step an Inf stands in the reduced gradient of rank 1.
    """
    model, batch, loss = tiny_mlp()
    plan = read(PLAN.format(stage=stage, precision=precision))
    program = compile_plan(model, plan, batch, loss, executable=True).program
    values = held_values(model, program, torch.float32)

    finish, faulty = Gradients.finish, set()

    def finish_with_a_fault(self: Gradients) -> list[torch.Tensor]:
        gradients = finish(self)
        if id(self._storage) in faulty:
            gradients[-1][-1] = float("inf")
        return gradients

    def one(exe: Executable):
        def leaves(step: int) -> dict[str, torch.Tensor]:
            is_faulty = step == BAD_STEP and exe.comm.index("dp") == 1
            (faulty.add if is_faulty else faulty.discard)(id(exe.storage))
            return {name: value[:2] for name, value in batch.items()}

        return body(exe, leaves)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gradients, "finish", finish_with_a_fault)
        return run_ranks(program, values, one)[1]


def train(exe: Executable, leaves) -> dict[str, list]:
    """Take six steps and record what the user and the replicas see."""
    parameters = list(exe.storage.parameters.values())
    optimizer = adamw(parameters)
    record: dict[str, list] = {"without": [], "scale": [], "params": []}
    for step in range(STEPS):
        exe.step([leaves(step)], index=step)
        record["without"].append(all(p.grad is None for p in parameters))
        optimizer.step()
        exe.storage.stepped()
        optimizer.zero_grad()
        record["scale"].append(exe.storage.scaler.scale)
        record["params"].append([p.detach().clone() for p in parameters])
    return record


@pytest.mark.parametrize("stage", [0, 3])
def test_all_ranks_skip_the_step_in_which_one_overflows(stage: int) -> None:
    first, second = ranks(stage, train)
    for record in (first, second):
        assert record["without"] == [step == BAD_STEP for step in range(STEPS)]
        assert record["scale"] == [FIRST_SCALE] * 3 + [FIRST_SCALE / 2] * 3
        before, after = record["params"][BAD_STEP - 1], record["params"][BAD_STEP]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert all(torch.isfinite(p).all() for p in record["params"][-1])
    if stage == 0:
        for a, b in zip(first["params"][-1], second["params"][-1], strict=True):
            assert torch.equal(a, b)


def test_a_flag_that_is_not_shared_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(self: LossScaler, gradients, comm, device) -> bool:
        bad = any(not bool(torch.isfinite(g).all()) for g in gradients)
        self._adapt(bad)
        return not bad

    monkeypatch.setattr(LossScaler, "keeps", alone)
    first, second = ranks(3, train)
    assert first["scale"] != second["scale"] or first["without"] != second["without"]


def test_rounds_after_an_overflow_are_dropped_until_the_optimizer_steps() -> None:
    def accumulate(exe: Executable, leaves) -> list[bool]:
        seen = []
        for step in (BAD_STEP, 0, 1):
            exe.step([leaves(step)], index=step)
            seen.append(all(p.grad is None for p in exe.storage.parameters.values()))
        exe.storage.stepped()
        exe.step([leaves(0)], index=3)
        return [*seen, all(p.grad is None for p in exe.storage.parameters.values())]

    assert ranks(0, accumulate) == [[True, True, True, False]] * 2


def test_in_bf16_all_ranks_stop_together() -> None:
    def clip(exe: Executable, leaves) -> str:
        exe.step([leaves(BAD_STEP)])
        try:
            clip_grad_norm(exe.storage, exe.comm, 1.0, error_if_nonfinite=True)
        except AutoshardError as error:
            return str(error)
        return "went on"

    messages = ranks(3, clip, "params = bf16")
    assert "nothing was clipped" in messages[0]
    assert messages[0] == messages[1]
