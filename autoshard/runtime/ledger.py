"""Measure memory: the bytes of live tensor storages, counted while a step runs.

Storages are counted from the operator that first returns them until they are freed, whoever holds
them. What kernels and backends allocate for themselves is not seen. Only for measuring: each
operator of the step passes through Python.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.cost.peak import (
    ACTIVATIONS,
    COMMUNICATION,
    GATHERED,
    GRADIENTS,
    HOST,
    OPTIMIZER,
    PARAMETERS,
    Peak,
)
from autoshard.ir.buckets import is_kept
from autoshard.ir.graph_function import FLAT_GRAD, FULL, FULL_GRAD, Port
from autoshard.ir.program import PER_MICROBATCH, Bucket
from autoshard.ops.communicator import Work
from autoshard.runtime.comm import Transport
from autoshard.runtime.executor import Executable
from autoshard.runtime.offload import HostMemory
from autoshard.runtime.phases import Phase
from autoshard.runtime.storage import Storage
from autoshard.runtime.work import Transfer


class Ledger(TorchDispatchMode):
    """Counts live storages while it is entered, by what they are for.

    ``peak`` is the moment with the most bytes: their sum by category, and the operator that made
    the last of them. What lies in host memory is apart from that moment: the most of it counts.
    """

    def __init__(self) -> None:
        """Start with nothing counted."""
        super().__init__()
        self._live: dict[int, tuple[int, str]] = {}  # by address of the storage
        self._refs: dict[int, weakref.ref] = {}
        self._by_category: Counter[str] = Counter()
        self.category, self.action = ACTIVATIONS, ""
        self.peak = Peak({}, "", "")

    @property
    def now(self) -> dict[str, int]:
        """Return the bytes that live at the moment, by category."""
        return {name: nbytes for name, nbytes in self._by_category.items() if nbytes}

    def hold(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Count tensors that are there already, or count them as ``category`` from now on."""
        for tensor in tensors:
            self._count(tensor.untyped_storage(), category, "")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> object:  # type: ignore[no-untyped-def]
        """Run an operator and count what it returns."""
        if any(issubclass(kind, torch.Tensor) and kind not in _PLAIN for kind in types):
            return NotImplemented  # a subclass first runs on its own parts, which come here
        result = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor) and type(value) in _PLAIN:
                self._see(value, str(func))
        return result

    @contextmanager
    def counting(self, category: str) -> Iterator[None]:
        """Count what is made inside as ``category``."""
        before, self.category = self.category, category
        try:
            yield
        finally:
            self.category = before

    def recount(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage has another size now."""
        _, category = self._live.get(storage._cdata, (0, self.category))
        self._count(storage, category, "resize_")

    def _see(self, tensor: torch.Tensor, made_by: str) -> None:
        if tensor.untyped_storage()._cdata not in self._live:
            self._count(tensor.untyped_storage(), self.category, made_by)

    def _count(self, storage: torch.UntypedStorage, category: str, made_by: str) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._forget(key)
        self._live[key] = nbytes, category
        self._refs[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._by_category[category] += nbytes
        sizes = {name: size for name, size in self._by_category.items() if name != HOST}
        if sum(sizes.values()) > self.peak.total:
            self.peak = replace(self.peak, sizes=sizes, action=self.action, node=made_by)
        if self._by_category[HOST] > self.peak.host:
            self.peak = replace(self.peak, host=self._by_category[HOST])
        if self._by_category[GATHERED] > self.peak.gathered:
            self.peak = replace(self.peak, gathered=self._by_category[GATHERED])

    def _forget(self, key: int) -> None:
        if key in self._live:
            nbytes, category = self._live.pop(key)
            self._refs.pop(key)
            self._by_category[category] -= nbytes


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def hold_state(
    ledger: Ledger,
    storage: Storage,
    moments: Iterable[tuple[torch.nn.Parameter, torch.Tensor]],
) -> None:
    """Count what a rank keeps between steps, gradients too if there are any.

    ``moments`` are what the optimizer keeps, each with its parameter.
    """
    buckets, away = storage.layout.buckets, set(storage.away)
    for name, flat in storage.stored.items():
        is_read = buckets[name].read_dtype == buckets[name].dtype
        category = PARAMETERS if is_read else OPTIMIZER
        ledger.hold([flat], HOST if name in away else category)
    for name, narrow in storage.narrow.items():
        ledger.hold([narrow], HOST if name in away else PARAMETERS)
    ledger.hold(storage.buffers.values(), PARAMETERS)
    if storage.host is not None:
        ledger.hold(storage.host.copies.values(), PARAMETERS)
    slots = storage.layout.slots
    on_host = {id(p) for n, p in storage.parameters.items() if slots[n].bucket in away}
    for parameter, moment in moments:
        ledger.hold([moment], HOST if id(parameter) in on_host else OPTIMIZER)
    for parameter in storage.parameters.values():
        if parameter.grad is not None:
            ledger.hold([parameter.grad], HOST if id(parameter) in on_host else GRADIENTS)


@contextmanager
def measured(executables: Iterable[Executable], ledger: Ledger) -> Iterator[None]:
    """Let a ledger count the steps of executables of one rank, by category and action."""
    kept = [(exe, exe.comm, exe.code, exe.storage.host) for exe in executables]
    for exe, comm, code, host in kept:
        ledger.hold(exe.messages.buffers, COMMUNICATION)
        axes = {bucket.axis for bucket in exe.storage.layout.buckets.values()}
        exe.comm = _Watched(comm, ledger, axes)  # type: ignore[assignment]
        if host is not None:
            exe.storage.host = _WatchedHost(host, ledger)  # type: ignore[assignment]
        exe.code = {key: _watch(phase, key, exe, ledger) for key, phase in code.items()}
    try:
        # What the run-time itself makes between phases are sums of gradients.
        with ledger, ledger.counting(GRADIENTS):
            yield
    finally:
        for exe, comm, code, host in kept:
            exe.comm, exe.code, exe.storage.host = comm, code, host


def _watch(phase: Phase, key: tuple[int, str], exe: Executable, ledger: Ledger) -> Phase:
    """Return the phase with its insides and its results counted for what they are."""
    numbers, buckets = itertools.count(), exe.storage.layout.buckets

    def call(comm: Transport, args: list, *give: Callable) -> tuple:
        number = next(numbers) % exe.program.num_microbatches
        ledger.action = f"{key[0]}{key[1]}{number if key[1] in PER_MICROBATCH else ''}"
        with ledger.counting(ACTIVATIONS):
            results = phase.call(comm, args, *[_counted(f, ledger) for f in give])
        received = exe.messages.in_buffers(results)  # these stay what they are
        for place, (port, value) in enumerate(zip(phase.outputs, results, strict=True)):
            if value is not None and place not in received:
                ledger.hold([value], _category(port, buckets))
        return results

    return replace(phase, call=call)


def _counted(give: Callable, ledger: Ledger) -> Callable:
    def take(name: str, grad: torch.Tensor) -> None:
        with ledger.counting(GRADIENTS):
            give(name, grad)

    return take


def _category(port: Port, buckets: Mapping[str, Bucket]) -> str:
    if port.kind in (FLAT_GRAD, FULL_GRAD):
        return GRADIENTS
    if port.kind == FULL:
        return GATHERED if buckets[port.name].axis is not None else PARAMETERS
    return GATHERED if is_kept(port) else ACTIVATIONS


class _Watched:
    """A transport whose buffers are counted as communication, or as gathered."""

    def __init__(self, comm: Transport, ledger: Ledger, axes: Collection[str | None]) -> None:
        self._comm, self._ledger = comm, ledger
        self._axes = axes  # over which buckets are cut

    def __getattr__(self, name: str) -> object:
        return getattr(self._comm, name)

    def all_reduce_start(self, *args: Any, **kwargs: Any) -> Work:
        return self._start(COMMUNICATION, self._comm.all_reduce_start, *args, **kwargs)

    def all_gather_start(self, *args: Any) -> Work:
        category = GATHERED if args[1] in self._axes else ACTIVATIONS
        return self._start(category, self._comm.all_gather_start, *args)

    def reduce_scatter_start(self, *args: Any) -> Work:
        return self._start(COMMUNICATION, self._comm.reduce_scatter_start, *args)

    def transfer_start(self, transfers: Sequence[Transfer]) -> list[Work]:
        self._ledger.hold([item.value for item in transfers], COMMUNICATION)
        return self._comm.transfer_start(transfers)

    def _start(self, category: str, start: Callable, *args: Any, **kwargs: Any) -> Work:
        with self._ledger.counting(category):
            return _WatchedWork(start(*args, **kwargs), category, self._ledger)


class _WatchedHost:
    """Host memory that counts what comes there, and the copies that go to the device."""

    def __init__(self, host: HostMemory, ledger: Ledger) -> None:
        self._host, self._ledger = host, ledger

    def __getattr__(self, name: str) -> object:
        return getattr(self._host, name)

    def send(self, stored: Mapping[str, torch.Tensor]) -> None:
        with self._ledger.counting(PARAMETERS):
            self._host.send(stored)

    def take(self, value: torch.Tensor) -> torch.Tensor:
        with self._ledger.counting(HOST):
            return self._host.take(value)


@dataclass
class _WatchedWork:
    work: Work
    category: str
    ledger: Ledger

    def wait(self) -> torch.Tensor:
        with self.ledger.counting(self.category):
            return self.work.wait()
