"""Handles of what is under way: results that may be read only after ``wait``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from autoshard.diagnostics import CommunicationError


@dataclass
class Ready:
    """A result that is there already: an axis of one rank needs no communication."""

    value: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Return the value."""
        return self.value


class Transfer(NamedTuple):
    """One message between neighbours: send ``value``, or receive into it."""

    is_send: bool
    value: torch.Tensor
    axis: str
    peer: int  # coordinate along the axis
    tag: int  # equal on both ends, unique among the messages in flight between two ranks


class Started(Protocol):
    """What torch.distributed gives for an operation under way."""

    def wait(self) -> object:
        """Block until the operation is done."""


@dataclass
class Clock:
    """Sums up what communication costs a rank."""

    seconds: float = 0.0  # blocked in waits
    sent: int = 0  # bytes handed to gloo; on other back ends they aren't ours to count


class Pending:
    """Operations of torch.distributed under way; ``finish`` makes the result when all are done.

    ``what`` names the operation in the message should a peer be lost.
    """

    def __init__(
        self,
        started: Sequence[Started],
        finish: Callable[[], torch.Tensor],
        clock: Clock,
        what: str,
    ) -> None:
        """Hold the operations; their buffers stay alive through ``finish``."""
        self._started, self._finish = started, finish
        self._clock, self._what = clock, what
        self._value: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Block until all operations are done and return the result."""
        if self._value is not None:
            return self._value
        begin = time.perf_counter()
        with named(self._what):
            for started in self._started:
                started.wait()
            value = self._value = self._finish()
        self._clock.seconds += time.perf_counter() - begin
        self._started, self._finish = (), lambda: value  # let go of the buffers
        return value


class Delivery:
    """One message under way: made for each transfer, so it does no more than it must."""

    __slots__ = ("_clock", "_item", "_started")

    def __init__(self, started: Started, item: Transfer, clock: Clock) -> None:
        """Hold the operation, and with it what is sent or received into."""
        self._started: Started | None = started
        self._item, self._clock = item, clock

    def wait(self) -> torch.Tensor:
        """Block until the message is delivered and return its value."""
        if self._started is not None:
            begin = time.perf_counter()
            try:
                self._started.wait()
            except RuntimeError as error:
                raise lost(describe(self._item), error) from error
            self._clock.seconds += time.perf_counter() - begin
            self._started = None
        return self._item.value


def describe(item: Transfer) -> str:
    """Return a message in words."""
    kind = "send to" if item.is_send else "receive from"
    return f"{kind} {item.peer} of {list(item.value.shape)} over axis '{item.axis}'"


def lost(what: str, error: RuntimeError, ended: str = "") -> CommunicationError:
    """Return the error that says which operation failed: a backend only gives a bare reason.

    ``ended`` says which ranks are known to have ended, and how.
    """
    reason = (str(error).splitlines() or ["no reason given"])[0]
    if not ended:
        help = "another rank stopped or hangs: its own message names the cause"
        return CommunicationError(f"{what} failed: {reason}", help=help)
    help = "its own output names the cause"
    if "SIGKILL" in ended:
        help = "SIGKILL comes from outside: from the system when memory runs out, or from a person"
    return CommunicationError(f"{what} failed: {ended}", help=help, notes=(reason,))


@contextmanager
def named(what: str) -> Iterator[None]:
    """Say which operation it was when a backend fails: it only raises a bare RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        raise lost(what, error) from error
