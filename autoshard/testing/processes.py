"""Real processes without a launcher: fork this one, connect the copies by gloo, collect results.

What the parent imported and compiled is there in all of them, which is what makes it cheap. Only
for processes that have used one thread so far.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from autoshard.diagnostics import CommunicationError

Body = Callable[[int], object]


def run_processes(world: int, body: Body, timeout_s: float) -> list:
    """Return ``body(rank)`` of every rank, each run in a process of its own.

    When one fails, or time is up, all are ended and the first cause is raised: none is left.
    """
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ends = [context.Pipe(duplex=False) for _ in range(world)]
        jobs = [
            context.Process(target=_main, args=(rank, world, store, body, ends[rank][1]))
            for rank in range(world)
        ]
        for job in jobs:
            job.start()
        try:
            return _collect([reader for reader, _ in ends], time.monotonic() + timeout_s)
        finally:
            for job in jobs:
                job.kill()
                job.join()


def _collect(readers: list[Connection], deadline: float) -> list:
    results: dict[int, object] = {}
    while len(results) < len(readers):
        waiting = [r for i, r in enumerate(readers) if i not in results]
        ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [i for i in range(len(readers)) if i not in results]
            raise CommunicationError(f"ranks {missing} did not finish in time")
        for reader in (r for r in waiting if r in ready):
            is_good, result = reader.recv()
            if not is_good:
                raise CommunicationError(str(result))
            results[readers.index(reader)] = result
    return [results[rank] for rank in range(len(readers))]


def _main(rank: int, world: int, store: str, body: Body, writer: Connection) -> None:
    try:
        files = dist.FileStore(store, world)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=world)
        writer.send((True, body(rank)))
    except BaseException:  # whatever it is, the parent reports it and ends the others
        writer.send((False, f"rank {rank}: {traceback.format_exc()}"))
