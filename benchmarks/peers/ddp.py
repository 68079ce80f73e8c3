"""DistributedDataParallel, as its documentation recommends."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from benchmarks.config import Size
from benchmarks.peers.model import adamw, build_model
from benchmarks.peers.trainer import Trainer, data_parallel


def ddp(size: Size) -> Trainer:
    """Return DDP with its default buckets, whose views are the gradients."""
    model = DistributedDataParallel(build_model(size), gradient_as_bucket_view=True)
    return data_parallel(model, adamw(list(model.parameters())), size)
