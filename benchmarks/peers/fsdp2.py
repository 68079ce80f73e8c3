"""Fully sharded data parallel (FSDP2): each block and the root a unit, as its tutorial does.

On gloo a reduce-scatter is an all-reduce underneath, which moves twice the bytes. FSDP2 lets its
user bring collectives, so it is measured with ones made of messages as well: with the same means.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.config import Size
from benchmarks.peers.model import GPT, adamw, build_model
from benchmarks.peers.trainer import Trainer, data_parallel


def fsdp2(size: Size, *, kept: bool = False, messages: bool = False) -> Trainer:
    """Return FSDP2; ``kept`` parameters stay gathered until their backward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = shard(build_model(size), mesh, kept=kept, messages=messages)
    return data_parallel(model, adamw(list(model.parameters())), size)


def shard(model: GPT, mesh: DeviceMesh, *, kept: bool, messages: bool) -> GPT:
    """Shard every block, then the root, over ``mesh``."""
    for module in (*model.h, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=not kept)
        assert isinstance(module, FSDPModule)
        if messages:
            module.set_custom_all_gather(AllGather())
            module.set_custom_reduce_scatter(ReduceScatter())
    return model


class _Allocate:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer for a collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Allocate):
    """An all-gather made of messages."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        """Start it; wait for it unless ``async_op``."""
        me, count = dist.get_rank(group), dist.get_world_size(group)
        parts = output_tensor.chunk(count)
        works = []
        for peer in (p for p in range(count) if p != me):
            works.append(dist.irecv(parts[peer], group=group, group_src=peer))
            works.append(dist.isend(input_tensor, group=group, group_dst=peer))
        if parts[me].data_ptr() != input_tensor.data_ptr():
            parts[me].copy_(input_tensor)
        return _result(Works(works), async_op)


class ReduceScatter(_Allocate):
    """A reduce-scatter made of messages, which moves no byte that isn't needed."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Start it; the sum is made when it is waited for."""
        me, count = dist.get_rank(group), dist.get_world_size(group)
        parts = input_tensor.chunk(count)
        others = [p for p in range(count) if p != me]
        received = [torch.empty_like(output_tensor) for _ in others]
        works = []
        for peer, buffer in zip(others, received, strict=True):
            works.append(dist.irecv(buffer, group=group, group_src=peer))
            works.append(dist.isend(parts[peer], group=group, group_dst=peer))

        def finish() -> None:
            torch.add(parts[me], received[0], out=output_tensor)
            for part in received[1:]:
                output_tensor.add_(part)
            if op == dist.ReduceOp.AVG:
                output_tensor.div_(count)

        return _result(Works(works, finish), async_op)


class Works:
    """Messages that are waited for as one collective."""

    def __init__(self, works: Sequence[dist.Work | None], finish: object = None) -> None:
        self._works, self._finish = works, finish

    def wait(self) -> bool:
        """Wait for all messages, then finish."""
        for work in self._works:
            if work is not None:
                work.wait()
        if callable(self._finish):
            self._finish()
        self._works, self._finish = (), None
        return True


def _result(works: Works, async_op: bool) -> dist.Work | None:
    if async_op:
        return works  # type: ignore[return-value]
    works.wait()
    return None
