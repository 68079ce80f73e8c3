"""Our engine on the same model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import autoshard
from autoshard.runtime.engine import Engine
from benchmarks.config import PLANS, Ours, Size
from benchmarks.peers.model import adamw, build_model, global_batch, local_batch, token_loss
from benchmarks.peers.trainer import Trainer

# torchrun has started as many ranks as the plan needs: all else follows from the plan.


def ours(size: Size, name: str) -> Trainer:
    """Return the engine of one of ``PLANS``."""
    return train_by(size, PLANS[name])


def train_by(size: Size, plan: Ours) -> Trainer:
    """Return the engine of a plan; it is a user's loop, checks of ranks included."""
    engine, batch = build_engine(size, plan)
    optimizer = adamw(list(engine.parameters()))

    def step(number: int) -> Tensor:
        loss = engine.forward_backward(batch(number))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Trainer(step, torch.Tensor.item)


def build_engine(size: Size, plan: Ours) -> tuple[Engine, Callable[[int], dict[str, Tensor]]]:
    """Return the engine of a plan, and what gives this rank's batch of a step."""
    ids, labels = global_batch(size, 0)
    parts = plan.mesh.get("dp", 1)
    example = {"ids": ids.chunk(parts)[0], "labels": labels.chunk(parts)[0]}
    engine = autoshard.parallelize(
        build_model(size), plan.text(size), example=example, loss=batch_loss, verify=False
    )

    def batch(number: int) -> dict[str, Tensor]:
        ids, labels = local_batch(size, number, engine.dp_rank, engine.dp_size)
        return {"ids": ids, "labels": labels}

    return engine, batch


def batch_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss as our engine asks for it."""
    return token_loss(output, batch["labels"])
