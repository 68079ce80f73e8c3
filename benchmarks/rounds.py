"""Run on every rank of a launch: build all entrants, compare their losses, then take turns."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.config import GATED_STEPS, LOSS_TOLERANCE, Launch, Size
from benchmarks.peers import build
from benchmarks.peers.model import build_model
from benchmarks.peers.trainer import Trainer, eager

DIVERGES = "no communication"  # a floor, not a trainer: its ranks drift apart


@dataclass
class Entrant:
    """A trainer, the steps that it has made, and what was measured of it."""

    trainer: Trainer
    steps: int = 0

    def run(self, count: int) -> torch.Tensor:
        """Make ``count`` steps and return the last one's loss."""
        for _ in range(count):
            loss = self.trainer.step(self.steps)
            self.steps += 1
        return loss


def run_launch(launch: Launch, size: Size, is_private: bool) -> dict:
    """Return what this rank measured; raises when an entrant's losses are wrong."""
    expected = reference_losses(size)
    entrants, losses = {}, {}
    for name in launch.entrants:
        entrant = entrants[name] = Entrant(build(name, size))
        losses[name] = [entrant.trainer.loss(entrant.run(1)) for _ in range(GATED_STEPS)]
        if name != DIVERGES:
            _require_equal(name, losses[name], expected)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in entrants}
    for turn in range(size.rounds):
        names = list(entrants) if turn % 2 == 0 else list(reversed(entrants))
        for name in names:
            rounds[name].append(_timed(entrants[name], size.inner, is_private))
    return {"losses": losses, "expected": expected, "rounds": rounds}


def reference_losses(size: Size) -> list[float]:
    """Return the first losses of one process that trains on the whole batch."""
    losses = torch.zeros(GATED_STEPS)
    if dist.get_rank() == 0:
        alone = eager(size, build_model(size))
        losses = torch.stack([alone.step(number) for number in range(GATED_STEPS)])
    dist.broadcast(losses, 0)
    return losses.tolist()


def _require_equal(name: str, found: list[float], expected: list[float]) -> None:
    pairs = zip(found, expected, strict=True)
    if any(abs(a - b) > LOSS_TOLERANCE * abs(b) for a, b in pairs):
        raise SystemExit(f"'{name}' trains another model: losses {found}, expected {expected}")


def _timed(entrant: Entrant, count: int, is_private: bool) -> dict[str, float]:
    """Return seconds and CPU seconds of a step on this rank, and the bytes that all ranks sent."""
    gc.collect()
    dist.barrier()
    sent = _sent_bytes() if is_private else 0
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    entrant.run(count)
    wall, used = time.perf_counter() - start, time.process_time() - cpu
    dist.barrier()
    sent = _sent_bytes() - sent if is_private else 0
    return {"wall": wall / count, "cpu": used / count, "sent": sent / count}


def _sent_bytes() -> int:
    """Return what the network namespace has sent: if it is our own, that is all between ranks."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    loopback = next(line for line in lines if line.strip().startswith("lo:"))
    return int(loopback.split(":")[1].split()[8])
