"""Small messages between all ranks on the CPU, outside of steps: to agree, or to stop together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from autoshard.diagnostics import RuntimeMismatchError
from autoshard.runtime.failure import first_line, pack_error, unpack_error
from autoshard.runtime.peers import ended, here
from autoshard.runtime.work import lost

T = TypeVar("T")


class Control:
    """All ranks of the job. One process needs no group."""

    def __init__(
        self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None
    ) -> None:
        """Use ``group``, which must hold all ranks and carry CPU tensors; all ranks call this."""
        self.rank, self.size, self._group = rank, size, group
        self._places: tuple[str, ...] = ()
        self._places = tuple(self.gather_text(here())) if size > 1 else ()

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return every rank's numbers (as many on each rank), by rank."""
        if self.size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64)
        return [row.tolist() for row in self._gather(mine)]

    def gather_text(self, text: str) -> list[str]:
        """Return every rank's text, by rank."""
        if self.size == 1:
            return [text]
        raw = text.encode()
        lengths = [row[0] for row in self.gather([len(raw)])]
        mine = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        mine[: len(raw)] = torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8)[: len(raw)]
        rows = zip(self._gather(mine), lengths, strict=True)
        return [bytes(row[:length].tolist()).decode() for row, length in rows]

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        with self._named("agreement of all ranks"):
            dist.all_gather(rows, mine, group=self._group)
        return rows

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Say what failed when a backend fails, and which ranks have ended."""
        try:
            yield
        except RuntimeError as error:
            raise lost(what, error, ended(self._places)) from error

    def broadcast(self, value: torch.Tensor, what: str = "broadcast from rank 0") -> torch.Tensor:
        """Return rank 0's value; the others give a CPU tensor of its shape and dtype.

        ``what`` says in words what is sent, for the error of a rank that is left alone.
        """
        if self.size > 1:
            value = value.contiguous()
            with self._named(what):
                dist.broadcast(value, 0, group=self._group)
        return value

    def from_first(self, work: Callable[[], bytes]) -> bytes:
        """Return on every rank what ``work`` gives on rank 0; it runs nowhere else.

        If it fails there, every rank raises that error.
        """
        if self.size == 1:
            return work()
        raw, failure = b"", None
        if self.rank == 0:
            try:
                raw = work()
            except Exception as error:  # whatever it is, the other ranks must hear of it
                raw, failure = pack_error(error), error
        head = torch.tensor([len(raw), failure is not None])
        size, failed = self.broadcast(head, "waiting for rank 0, which compiles,").tolist()
        # One byte more: a buffer may not be empty.
        flat = torch.frombuffer(bytearray(raw + b"\0"), dtype=torch.uint8)
        flat = self.broadcast(flat if self.rank == 0 else torch.zeros(size + 1, dtype=torch.uint8))
        if failure is not None:
            raise failure
        raw = flat.numpy()[:size].tobytes()
        if failed:
            raise unpack_error(raw)
        return raw

    def together(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns on this rank; if it fails on any rank, stop on all."""
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = error
        failed = [rank for rank, (bad,) in enumerate(self.gather([failure is not None])) if bad]
        if not failed:
            return result
        reasons = self.gather_text("" if failure is None else first_line(failure))
        if failure is not None:
            raise failure
        raise RuntimeMismatchError(
            f"{name_ranks(failed)} can't go on: {reasons[failed[0]]}",
            help="all ranks stop; the whole message is with that rank's output",
        )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0, 1 and 5"."""
    words = [str(rank) for rank in ranks]
    if len(words) == 1:
        return f"rank {words[0]}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"
