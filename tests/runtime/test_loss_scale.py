"""The loss scale: how it adapts, and that checkpoints carry it."""

from __future__ import annotations

import io

import pytest
import torch

import autoshard
from autoshard.ops.one_rank import OneRank
from autoshard.runtime.loss_scale import DROPPED_IN_A_ROW, GROWTH_INTERVAL, SMALLEST, LossScaler
from autoshard.testing.models import tiny_mlp

CPU = torch.device("cpu")
GOOD, BAD = [torch.ones(2)], [torch.tensor([1.0, float("nan")])]
PLAN = """autoshard 1
batch { micro_batch_size = 4 }
precision { params = fp16, loss_scale = dynamic }
"""


def calls(scaler: LossScaler, gradients: list[torch.Tensor], count: int) -> None:
    for _ in range(count):
        scaler.keeps(gradients, OneRank(), CPU)
        scaler.stepped()


def test_the_scale_doubles_after_a_while_and_halves_at_an_overflow() -> None:
    scaler = LossScaler(1024.0, True)
    calls(scaler, GOOD, GROWTH_INTERVAL - 1)
    assert scaler.scale == 1024.0
    calls(scaler, GOOD, 1)
    assert scaler.scale == 2048.0
    calls(scaler, BAD, 1)
    assert scaler.scale == 1024.0
    calls(scaler, BAD, 60)
    assert scaler.scale == SMALLEST


def test_a_static_scale_stays() -> None:
    scaler = LossScaler(128.0, False)
    assert not scaler.keeps(BAD, OneRank(), CPU)
    scaler.stepped()
    calls(scaler, GOOD, GROWTH_INTERVAL)
    assert scaler.scale == 128.0


def test_somebody_is_told_when_no_optimizer_steps() -> None:
    scaler = LossScaler(128.0, False)
    with pytest.warns(UserWarning, match="did not come"):
        for _ in range(DROPPED_IN_A_ROW):
            scaler.keeps(BAD, OneRank(), CPU)


def test_the_state_dict_holds_the_scale_and_the_model_s_names_only() -> None:
    model, batch, loss = tiny_mlp()
    engine = autoshard.parallelize(model, PLAN, example=batch, loss=loss)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    engine.forward_backward(batch)
    optimizer.step()
    file = io.BytesIO()
    torch.save(engine.full_state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert list(state) == list(model.state_dict())
    assert all(value.dtype is torch.float32 for value in state.values())
    model.load_state_dict(state)
    state._metadata["autoshard"]["loss_scale"] = 4.0
    engine.load_full_state_dict(state)
    assert engine.stats()["loss_scale"] == 4.0
    engine.load_full_state_dict(dict(state))  # without: the scale stays
    assert engine.stats()["loss_scale"] == 4.0


def test_the_optimizer_s_step_ends_the_skipping() -> None:
    model, batch, loss = tiny_mlp()
    engine = autoshard.parallelize(model, PLAN, example=batch, loss=loss)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    engine.forward_backward({**batch, "x": batch["x"] * 1e6})
    assert all(p.grad is None for p in engine.parameters())
    engine.forward_backward(batch)
    assert all(p.grad is None for p in engine.parameters())
    optimizer.step()
    engine.forward_backward(batch)
    assert all(torch.isfinite(p.grad).all() for p in engine.parameters())
