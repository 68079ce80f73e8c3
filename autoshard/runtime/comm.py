"""Mesh axes as process groups: the Communicator and Transport of real runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Protocol

import torch
import torch.distributed as dist

from autoshard.mesh import Mesh
from autoshard.ops.communicator import Communicator, Work
from autoshard.runtime.gloo import GlooAxis
from autoshard.runtime.nccl import NcclAxis
from autoshard.runtime.offload import HostMemory
from autoshard.runtime.work import Clock, Ready, Transfer

AxisGroup = GlooAxis | NcclAxis
UNIONS = ("dp",)  # names that may stand for several axes of the mesh


class Transport(Communicator, Protocol):
    """What the run-time asks of the other ranks: collectives by axis, and messages along one."""

    device: torch.device
    host: HostMemory | None
    clock: Clock

    def transfer_start(self, transfers: Sequence[Transfer]) -> list[Work]:
        """Post messages that stand side by side in the schedule; one Work for each."""


class ProcessGroups:
    """The process groups of one rank, one per axis with more than one place."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        device: torch.device,
        *,
        subsets: Mapping[str, Sequence[tuple[int, ...]]] = MappingProxyType({}),
        timeout: timedelta | None = None,
    ) -> None:
        """Make every group of every axis, in one order on all ranks.

        ``subsets`` are coordinates along an axis that reduce among themselves: stages that tie a
        parameter, ranks that keep the same head.
        """
        self.mesh, self.rank, self.device, self.clock = mesh, rank, device, Clock()
        self.host = HostMemory(device) if device.type == "cuda" else None
        make, backend = (GlooAxis, "gloo") if device.type == "cpu" else (NcclAxis, "nccl")
        self._axes: dict[str, AxisGroup] = {}
        for axis in (*mesh.names, *UNIONS):
            if mesh.size(axis) > 1 and axis not in self._axes:
                group = _axis_group(mesh.groups(axis), rank, backend, timeout)
                self._axes[axis] = make(axis, group, mesh.index(rank, axis), self.clock)
        # Messages have a group of their own: their order is the schedule's, not the collectives'.
        self._messages = None
        if mesh.size("pp") > 1:
            group = _axis_group(mesh.groups("pp"), rank, backend, timeout)
            self._messages = make("pp", group, mesh.index(rank, "pp"), self.clock)
        for axis in mesh.names:
            self._add_subsets(axis, subsets.get(axis, ()), backend, timeout)

    def index(self, axis: str) -> int:
        """Return this rank's coordinate along ``axis``."""
        return self.mesh.index(self.rank, axis)

    def size(self, axis: str) -> int:
        """Return the number of ranks along ``axis``."""
        return self.mesh.size(axis)

    def all_reduce_start(
        self, value: torch.Tensor, axis: str, op: str = "sum", members: Sequence[int] | None = None
    ) -> Work:
        """Reduce over the axis; ``members`` are coordinates along it when not all take part."""
        if self.size(axis) == 1 or (members is not None and len(members) == 1):
            return Ready(value)
        return self._axes[axis].all_reduce(value, op, tuple(members) if members else None)

    def all_gather_start(self, value: torch.Tensor, axis: str) -> Work:
        """Return the values of all ranks, stacked on a new first dimension.

        ``value`` may lie in pinned host memory (an offloaded bucket).
        """
        if self.size(axis) == 1:
            return Ready(value.unsqueeze(0))
        if self.host is not None and value.device.type == "cpu":
            return self._gather_from_host(value, axis, self.host)
        return self._axes[axis].all_gather(value)

    def reduce_scatter_start(self, value: torch.Tensor, axis: str) -> Work:
        """Sum ``value`` (size, ...) over the ranks and return this rank's slice."""
        if self.size(axis) == 1:
            return Ready(value.squeeze(0))
        return self._axes[axis].reduce_scatter(value)

    def broadcast(self, value: torch.Tensor, axis: str, source: int) -> torch.Tensor:
        """Return the value of the rank whose coordinate along ``axis`` is ``source``."""
        if self.size(axis) == 1:
            return value
        return self._axes[axis].broadcast(value, source).wait()

    def transfer_start(self, transfers: Sequence[Transfer]) -> list[Work]:
        """Post messages between pipeline neighbours; one Work for each."""
        assert self._messages is not None, "messages need a pipeline axis of several ranks"
        return self._messages.transfer(transfers)

    def _gather_from_host(self, value: torch.Tensor, axis: str, host: HostMemory) -> Work:
        """Gather pinned memory: the gather waits for the copy alone, the computation for neither.

        The result is made on the computing stream, which reads it, and before the copy, which
        follows all that was launched: whoever had that memory before is done with it.
        """
        group = self._axes[axis]
        assert isinstance(group, NcclAxis), "only a CUDA device has memory apart from the host's"
        out = group.room_for(value, self.device)
        part = host.fetch(value)
        with host.stream():
            return group.all_gather(part, out)

    def _add_subsets(
        self,
        axis: str,
        subsets: Sequence[tuple[int, ...]],
        backend: str,
        timeout: timedelta | None,
    ) -> None:
        """Let the axis know groups of some of its members (all ranks make all groups)."""
        for members in sorted(set(subsets)):
            if not 1 < len(members) < self.size(axis):
                continue
            parts = tuple(tuple(g[i] for i in members) for g in self.mesh.groups(axis))
            group = _own_group(parts, self.rank, backend, timeout)
            if group is not None:
                self._axes[axis].add_subset(members, group)


def _axis_group(
    groups: Sequence[tuple[int, ...]], rank: int, backend: str, timeout: timedelta | None
) -> dist.ProcessGroup:
    """Return this rank's group of an axis, whose groups hold every rank once."""
    own = _own_group(groups, rank, backend, timeout)
    assert own is not None, groups
    return own


def _own_group(
    groups: Sequence[tuple[int, ...]], rank: int, backend: str, timeout: timedelta | None
) -> dist.ProcessGroup | None:
    """Make all groups (every rank must take part) and return the one that holds ``rank``."""
    own = None
    for ranks in groups:
        made = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        if rank in ranks:
            own = made
    return own
