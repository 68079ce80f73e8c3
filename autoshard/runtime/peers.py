"""Which ranks have ended, and how: what a backend that only lost a connection can't say."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_PROC = Path("/proc")  # of Linux; elsewhere nobody is said to have ended
_LOOKS, _PAUSE_S = 20, 0.005  # connections close a moment before a process has ended


def here() -> str:
    """Return where this process runs, as one line: its number, its machine and container."""
    try:
        space = os.readlink(_PROC / "self" / "ns" / "pid")
    except OSError:
        space = ""
    return f"{os.getpid()} {socket.gethostname()} {space}"


def ended(places: Sequence[str]) -> str:
    """Return in words which ranks have ended, "" where none is known to.

    ``places`` holds what ``here()`` returned on each rank. Ranks of other machines are not seen.
    """
    for _ in range(_LOOKS):
        found = list(_ended(places))
        if found:
            return ", ".join(found)
        time.sleep(_PAUSE_S)
    return ""


def _ended(places: Sequence[str]) -> Iterator[str]:
    beside = here().split(" ")[1:]
    if not (_PROC / "self" / "stat").exists():
        return
    for rank, place in enumerate(places):
        pid, *where = place.split(" ")
        how = _ending(int(pid)) if where == beside else ""
        if how:
            yield f"rank {rank} (process {pid}) {how}"


def _ending(pid: int) -> str:
    """Return how a process has ended; "" while it runs."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "has ended"
    except OSError:  # not ours to look at
        return ""
    state, *fields = text.rpartition(")")[2].split()
    if state not in ("Z", "X"):
        return ""
    status = int(fields[-1])  # as of wait(), 0 where it is not ours to see
    if os.WIFSIGNALED(status):
        return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"has ended with exit code {os.WEXITSTATUS(status)}" if status else "has ended"
