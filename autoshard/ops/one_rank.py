"""The communicator of a mesh of one rank: every collective is the identity."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Done:
    """A collective that is already over."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    def wait(self) -> torch.Tensor:
        """Return the result."""
        return self._value


class OneRank:
    """Implements Communicator where all axes have size 1."""

    def index(self, axis: str) -> int:
        """Return 0."""
        return 0

    def size(self, axis: str) -> int:
        """Return 1."""
        return 1

    def all_reduce_start(
        self, value: torch.Tensor, axis: str, op: str = "sum", members: Sequence[int] | None = None
    ) -> Done:
        """Return the value itself."""
        return Done(value)

    def all_gather_start(self, value: torch.Tensor, axis: str) -> Done:
        """Return the value as the only one of the axis: (1, *shape)."""
        return Done(value.unsqueeze(0))

    def reduce_scatter_start(self, value: torch.Tensor, axis: str) -> Done:
        """Return the only slice of ``value`` (1, *shape)."""
        return Done(value.squeeze(0))

    def broadcast(self, value: torch.Tensor, axis: str, source: int) -> torch.Tensor:
        """Return the value itself."""
        return value
