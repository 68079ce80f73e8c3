"""What an operator may ask of the other ranks. Real groups and lock step both implement it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

IN_FLIGHT = 2  # micro-batches sent ahead of their receives, per stage and direction
DIRECT_BYTES = 1 << 16  # up to here one round of whole values beats two rounds of parts


class Work(Protocol):
    """A collective under way; its output may be read only after ``wait``."""

    def wait(self) -> torch.Tensor:
        """Block until the result is there and return it."""


class Communicator(Protocol):
    """Collectives by mesh axis. All ranks of the axis call the same ones in the same order.

    The ``*_start`` forms return at once; the plain operators are start + wait.
    """

    def index(self, axis: str) -> int:
        """Return this rank's coordinate along ``axis``."""

    def size(self, axis: str) -> int:
        """Return the number of ranks along ``axis`` (1 when the mesh has no such axis)."""

    def all_reduce_start(
        self, value: torch.Tensor, axis: str, op: str = "sum", members: Sequence[int] | None = None
    ) -> Work:
        """Reduce over the axis; ``members`` are coordinates along it when not all take part."""

    def all_gather_start(self, value: torch.Tensor, axis: str) -> Work:
        """Return the values of all ranks, stacked on a new first dimension: (size, *shape)."""

    def reduce_scatter_start(self, value: torch.Tensor, axis: str) -> Work:
        """Sum over ranks of ``value`` (size, *shape); each rank gets its own slice (*shape)."""

    def broadcast(self, value: torch.Tensor, axis: str, source: int) -> torch.Tensor:
        """Return the value of the rank whose coordinate along ``axis`` is ``source``."""
