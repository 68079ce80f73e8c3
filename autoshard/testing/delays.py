"""A communicator that sleeps before it posts: ranks drift apart, as they do on real machines."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch

from autoshard.ops.communicator import Work
from autoshard.runtime.comm import Transport
from autoshard.runtime.work import Transfer


class Delayed:
    """Wrap a rank's communicator; a share of its operations is held up at random, by seed."""

    def __init__(self, comm: Transport, seed: int, longest_s: float, share: float = 1.0) -> None:
        """Sleep up to ``longest_s`` before ``share`` of all operations."""
        self._comm, self._random = comm, random.Random(seed)
        self._longest_s, self._share = longest_s, share
        self.slept_s = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._comm, name)

    def all_reduce_start(
        self, value: torch.Tensor, axis: str, op: str = "sum", members: Sequence[int] | None = None
    ) -> Work:
        """Reduce over the axis, later."""
        self._sleep()
        return self._comm.all_reduce_start(value, axis, op, members)

    def all_gather_start(self, value: torch.Tensor, axis: str) -> Work:
        """Gather, later."""
        self._sleep()
        return self._comm.all_gather_start(value, axis)

    def reduce_scatter_start(self, value: torch.Tensor, axis: str) -> Work:
        """Reduce and scatter, later."""
        self._sleep()
        return self._comm.reduce_scatter_start(value, axis)

    def broadcast(self, value: torch.Tensor, axis: str, source: int) -> torch.Tensor:
        """Broadcast, later."""
        self._sleep()
        return self._comm.broadcast(value, axis, source)

    def transfer_start(self, transfers: Sequence[Transfer]) -> list[Work]:
        """Post messages, later."""
        self._sleep()
        return self._comm.transfer_start(transfers)

    def _sleep(self) -> None:
        if self._random.random() < self._share:
            seconds = self._random.uniform(0, self._longest_s)
            self.slept_s += seconds
            time.sleep(seconds)
