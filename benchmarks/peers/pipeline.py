"""torch.distributed.pipelining's schedules, and its 1F1B over tensor-parallel stages."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks.config import Size
from benchmarks.peers.model import GPT, build_model, global_batch, token_loss
from benchmarks.peers.tensor import optimizer_of, split
from benchmarks.peers.trainer import Trainer

VIRTUAL = {"Interleaved1F1B": 2, "ZBVZeroBubble": 2, "DualPipeV": 2}
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", *ZERO_BUBBLE)
SINGLE = ("GPipe", "1F1B")  # schedules that take one stage rather than a list
FOLDED = ("ZBVZeroBubble", "DualPipeV")  # rank 0 has the first and the last stage


class Part(nn.Module):
    """One stage of the GPT as a module."""

    def __init__(self, model: GPT, index: int, count: int) -> None:
        """Take over every ``count``-th part of the blocks, and what stands at either end."""
        super().__init__()
        share = len(model.h) // count
        self.h = model.h[index * share : (index + 1) * share]
        self.embed = model.embed if index == 0 else None
        self.ln_f, self.head = (model.ln_f, model.head) if index == count - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the stage's share of the model."""
        if self.embed is not None:
            x = self.embed(x)
        for block in self.h:
            x = block(x)
        return x if self.head is None else self.head(self.ln_f(x))


def pipeline(size: Size, schedule: str) -> Trainer:
    """Return one of torch's schedules with all ranks in one pipeline."""
    return _trainer(build_model(size), size, schedule, dist.group.WORLD)


def pipeline_tensor(size: Size) -> Trainer:
    """Return 1F1B over half of the ranks, each stage split by DTensor over the other half."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "tp"))
    model = split(build_model(size), mesh["tp"], sequence=False)
    with_loss = _trainer(model, size, "1F1B", mesh.get_group("pp"))

    def step(number: int) -> Tensor:
        with loss_parallel():
            return with_loss.step(number)

    return Trainer(step, with_loss.loss)


def _trainer(model: GPT, size: Size, name: str, group: dist.ProcessGroup | None) -> Trainer:
    rank, ranks, virtual = dist.get_rank(group), dist.get_world_size(group), VIRTUAL.get(name, 1)
    count = ranks * virtual
    chosen = [rank + ranks * turn for turn in range(virtual)]
    if name in FOLDED:
        chosen = [rank, count - 1 - rank]
    parts = [Part(model, index, count) for index in chosen]
    device = torch.device("cpu")
    stages = [
        PipelineStage(p, i, count, device, group=group) for p, i in zip(parts, chosen, strict=True)
    ]
    make = getattr(schedules, f"Schedule{name}")
    run = make(stages[0] if name in SINGLE else stages, size.microbatches, loss_fn=token_loss)
    optimizer = optimizer_of([p for part in parts for p in part.parameters()])
    is_first, is_last = 0 in chosen, count - 1 in chosen

    def step(number: int) -> Tensor:
        ids, labels = global_batch(size, number)
        losses: list[Tensor] = []
        target = labels if is_last else None
        run.step(*((ids,) if is_first else ()), target=target, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack([_local(x) for x in losses]).mean() if is_last else torch.zeros(())

    return Trainer(step, lambda loss: _from_last(loss, is_last))


def _local(loss: Tensor) -> Tensor:
    return (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).detach()


def _from_last(loss: Tensor, is_last: bool) -> float:
    """Return the loss of the ranks that have the last stage: all of theirs are equal."""
    total = torch.stack([loss, torch.tensor(float(is_last))])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
