"""Everyone the driver measures, by the names of ``benchmarks.config``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from benchmarks.config import Size
from benchmarks.peers.ddp import ddp
from benchmarks.peers.fsdp2 import fsdp2 as sharded
from benchmarks.peers.model import build_model
from benchmarks.peers.ours import ours
from benchmarks.peers.pipeline import SCHEDULES, pipeline, pipeline_tensor
from benchmarks.peers.tensor import dtensor, fsdp2_dtensor
from benchmarks.peers.trainer import Trainer, eager


def _alone(size: Size) -> Trainer:
    return eager(size, build_model(size), dist.get_rank(), dist.get_world_size())


PEERS: dict[str, Callable[[Size], Trainer]] = {
    "no communication": _alone,
    "eager": _alone,
    "ddp": ddp,
    "fsdp2": sharded,
    "fsdp2 kept": partial(sharded, kept=True),
    "fsdp2, messages": partial(sharded, messages=True),
    "fsdp2 kept, messages": partial(sharded, kept=True, messages=True),
    "dtensor": dtensor,
    "dtensor sp": partial(dtensor, sequence=True),
    **{f"torch {name}": partial(pipeline, schedule=name) for name in SCHEDULES},
    "torch 1F1B, dtensor": pipeline_tensor,
    "fsdp2, dtensor sp": fsdp2_dtensor,
    "fsdp2, dtensor sp, messages": partial(fsdp2_dtensor, messages=True),
}


def build(name: str, size: Size) -> Trainer:
    """Return the trainer of an entrant, one of PEERS or ``ours: `` and a plan's name."""
    if name.startswith("ours: "):
        return ours(size, name.removeprefix("ours: "))
    return PEERS[name](size)
