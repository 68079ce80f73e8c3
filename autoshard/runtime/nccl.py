"""Collectives of one axis on NCCL: its own, asynchronous; a wait orders streams, never the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from autoshard.compat import all_gather_into, reduce_scatter_into
from autoshard.ops.communicator import Work
from autoshard.runtime.work import Clock, Pending, Started, Transfer

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class NcclAxis:
    """One rank's end of an axis: one communicator, which has a stream of its own."""

    def __init__(self, name: str, group: dist.ProcessGroup, index: int, clock: Clock) -> None:
        """Use ``group``, whose member number ``index`` this rank is."""
        self.name, self._group, self._index = name, group, index
        self._size = dist.get_world_size(group)
        self._clock = clock
        self._subsets: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def add_subset(self, members: tuple[int, ...], group: dist.ProcessGroup) -> None:
        """Use ``group`` for reductions among ``members`` only."""
        self._subsets[members] = group

    def all_reduce(self, value: torch.Tensor, op: str, members: tuple[int, ...] | None) -> Work:
        """Start a reduction over all ranks of the axis, or over ``members``."""
        group = self._group
        if members is not None and len(members) < self._size:
            group = self._subsets[members]
        out = value.clone(memory_format=torch.contiguous_format)
        started = dist.all_reduce(out, OPS[op], group=group, async_op=True)
        return self._pending(started, lambda: out, "all_reduce")

    def room_for(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return memory on ``device`` for the values of all ranks: (size, *shape of ``value``)."""
        return torch.empty((self._size, *value.shape), dtype=value.dtype, device=device)

    def all_gather(self, value: torch.Tensor, out: torch.Tensor | None = None) -> Work:
        """Start gathering the values of all ranks on a new first dimension, or into ``out``."""
        value = value.contiguous()
        if out is None:
            out = self.room_for(value, value.device)
        started = all_gather_into(out, value, self._group)
        return self._pending(started, _after(out, value), "all_gather")

    def reduce_scatter(self, value: torch.Tensor) -> Work:
        """Start summing ``value`` (size, ...); the result is this rank's slice."""
        value = value.contiguous()
        out = value.new_empty(value.shape[1:])
        started = reduce_scatter_into(out, value, self._group)
        return self._pending(started, _after(out, value), "reduce_scatter")

    def broadcast(self, value: torch.Tensor, source: int) -> Work:
        """Start handing the value of ``source`` to all ranks of the axis."""
        out = value.clone(memory_format=torch.contiguous_format)
        started = dist.broadcast(out, group=self._group, group_src=source, async_op=True)
        return self._pending(started, lambda: out, "broadcast")

    def transfer(self, transfers: Sequence[Transfer]) -> list[Work]:
        """Post messages as one batch, so that opposite ones can't wait for each other."""
        posts = [
            dist.P2POp(
                dist.isend if item.is_send else dist.irecv,
                item.value,
                group=self._group,
                group_peer=item.peer,
            )
            for item in transfers
        ]
        batch = _Batch(dist.batch_isend_irecv(posts)) if posts else None
        return [self._pending(batch, _after(t.value), "message") for t in transfers]

    def _pending(
        self, started: Started | None, finish: Callable[[], torch.Tensor], kind: str
    ) -> Pending:
        what = f"{kind} over axis '{self.name}'"
        return Pending([started] if started else [], finish, self._clock, what)


class _Batch:
    """Several operations that are waited for as one."""

    def __init__(self, started: Sequence[Started]) -> None:
        self._started = started

    def wait(self) -> None:
        for started in self._started:
            started.wait()


def _after(out: torch.Tensor, *kept: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return what gives ``out``, and keeps the inputs alive until then."""
    return lambda: (out, kept)[0]
