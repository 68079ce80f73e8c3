"""What the driver asks of everyone it measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.config import Size
from benchmarks.peers.model import adamw, local_batch, token_loss


@dataclass(frozen=True)
class Trainer:
    """One training step, and how its loss is read.

    ``step(number)`` trains on batch ``number`` and returns this rank's loss; ``loss`` makes the
    global one of it, on every rank, outside of what is timed.
    """

    step: Callable[[int], Tensor]
    loss: Callable[[Tensor], float]


def data_parallel(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    size: Size,
    *,
    index: int | None = None,
    count: int | None = None,
) -> Trainer:
    """Return the usual loop over ``model``; part ``index`` of ``count`` of the batch is its own."""
    index = dist.get_rank() if index is None else index
    count = dist.get_world_size() if count is None else count

    def step(number: int) -> Tensor:
        ids, labels = local_batch(size, number, index, count)
        loss = token_loss(model(ids), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainer(step, mean_over_ranks)


def eager(size: Size, model: nn.Module, index: int = 0, count: int = 1) -> Trainer:
    """Return plain PyTorch on one process' share of the batch, without any communication."""
    return data_parallel(model, adamw(list(model.parameters())), size, index=index, count=count)


def mean_over_ranks(loss: Tensor) -> float:
    """Return the mean of the ranks' losses."""
    total = loss.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
