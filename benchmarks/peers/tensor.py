"""Tensor parallelism by DTensor, as torch's tutorial does it, without and with SequenceParallel."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.config import Size
from benchmarks.peers.fsdp2 import shard
from benchmarks.peers.model import GPT, adamw, build_model, local_batch, token_loss
from benchmarks.peers.trainer import Trainer

Styles = dict[str, ParallelStyle]


def fsdp2_dtensor(size: Size, *, messages: bool = False) -> Trainer:
    """Return FSDP2 over half of the ranks of a model that DTensor splits over the other half."""
    half = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("dp", "tp"))
    model = split(build_model(size), mesh["tp"], sequence=True)
    shard(model, mesh["dp"], kept=False, messages=messages)
    return tensor_trainer(model, size, mesh.get_local_rank("dp"), 2)


def dtensor(size: Size, *, sequence: bool = False) -> Trainer:
    """Return DTensor tensor parallelism; with ``sequence`` norms work on a share of the tokens."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = split(build_model(size), mesh, sequence)
    return tensor_trainer(model, size, 0, 1)


def split(model: GPT, mesh: DeviceMesh, sequence: bool) -> GPT:
    """Cut the model's layers over ``mesh``."""
    parallelize_module(model, mesh, _outer(sequence))
    for block in model.h:
        parallelize_module(block, mesh, _block(sequence))
    return model


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW; one fused kernel takes plain tensors or DTensors of one mesh, not both."""
    kinds: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        kind = parameter.device_mesh if isinstance(parameter, DTensor) else None
        kinds.setdefault(kind, []).append(parameter)
    return adamw([{"params": kind} for kind in kinds.values()])


def tensor_trainer(model: GPT, size: Size, index: int, count: int) -> Trainer:
    """Return the usual loop; logits stay split over the vocabulary, and so the loss."""
    optimizer = optimizer_of(list(model.parameters()))

    def step(number: int) -> Tensor:
        ids, labels = local_batch(size, number, index, count)
        with loss_parallel():
            loss = token_loss(model(ids), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainer(step, _mean)


def _mean(loss: Tensor) -> float:
    total = loss.full_tensor() if isinstance(loss, DTensor) else loss.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _outer(sequence: bool) -> Styles:
    styles: Styles = {
        "embed.wte": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(
            input_layouts=Shard(1) if sequence else Replicate(),
            output_layouts=Shard(-1),
            use_local_output=False,
        ),
    }
    if sequence:
        styles["embed"] = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(1)
        )
        styles["ln_f"] = SequenceParallel()
    return styles


def _block(sequence: bool) -> Styles:
    columns = {f"attn.{name}": ColwiseParallel() for name in ("q", "k", "v")}
    rows = Shard(1) if sequence else Replicate()
    styles: Styles = {
        **columns,
        "attn.out": RowwiseParallel(output_layouts=rows),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=rows),
    }
    if sequence:
        for norm in ("ln_1", "ln_2"):
            styles[norm] = SequenceParallel()
        for part in ("attn", "mlp"):
            styles[part] = PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate()
            )
    return styles
