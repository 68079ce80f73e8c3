"""Compare the most bytes that a rank holds with FSDP2's, DDP's and the ZeRO formula's.

    python benchmarks/memory.py [--full | --quick] [--json]

All train the same GPT with fused AdamW in float32, each alone in fresh processes, on 2 and on 4
gloo ranks. The ledger counts the storages of all live tensors, from the parameters on: what is
there between steps, and the most at once in the third step. What kernels and backends allocate for
themselves is not in it; resident memory, which is, comes second: its growth over what the process
holds between steps. The formula is ZeRO's count of parameters, gradients and Adam's state alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tabulate import tabulate

from autoshard.cost.zero_table import stored_state
from autoshard.plan import PrecisionBlock
from autoshard.runtime.ledger import Ledger
from autoshard.testing.processes import run_processes
from benchmarks.config import FULL, QUICK, SHORT, Size, zero
from benchmarks.peers.ddp import ddp
from benchmarks.peers.fsdp2 import fsdp2
from benchmarks.peers.model import build_model
from benchmarks.peers.ours import train_by
from benchmarks.peers.trainer import Trainer

WORLDS = (2, 4)
BETWEEN = "between steps"


def entrants(world: int) -> dict[str, tuple[int, Callable[[Size], Trainer]]]:
    """Return name -> the ZeRO stage whose formula it goes by, and how it is built."""
    stages = (1, 2, 3)
    ours = {f"ours, zero {z}": (z, partial(train_by, plan=zero(z, world))) for z in stages}
    off = zero(3, world, ", reshard_after_forward = off")
    ours["ours, zero 3, kept"] = (2, partial(train_by, plan=off))
    kept = partial(fsdp2, kept=True)
    return {**ours, "FSDP2": (3, fsdp2), "FSDP2, kept": (2, kept), "DDP": (0, ddp)}


# Ours -> the trainer that keeps and releases the same; stages 1 and 2 have no counterpart in torch.
COUNTERPART = {"ours, zero 3": "FSDP2", "ours, zero 3, kept": "FSDP2, kept"}


def measure(build: Callable[[Size], Trainer], size: Size) -> Callable[[int], dict]:
    """Return what every process does."""

    def body(rank: int) -> dict:
        trainer = build(size)
        losses = [trainer.loss(trainer.step(number)) for number in range(2)]
        gc.collect()
        ledger = Ledger()
        ledger.hold(live_tensors(), BETWEEN)
        held = ledger.now[BETWEEN]
        with ledger, resizes_seen(ledger):
            losses.append(trainer.loss(trainer.step(2)))
        Path("/proc/self/clear_refs").write_text("5")  # forget the resident peak
        before = resident("VmRSS")
        trainer.step(3)
        return {
            "losses": losses,
            "peak": ledger.peak.total,
            "between": held,
            "made_by": ledger.peak.node,
            "resident_growth": resident("VmHWM") - before,
        }

    return body


def live_tensors() -> Iterator[torch.Tensor]:
    """Yield every tensor that Python knows of and that has memory, parts of subclasses too."""
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter) and not item.is_meta:
            yield item


@contextmanager
def resizes_seen(ledger: Ledger) -> Iterator[None]:
    """Let the ledger see storages that are emptied and filled again, as FSDP2's gathered ones."""
    resize = torch.UntypedStorage.resize_

    def seen(storage: torch.UntypedStorage, nbytes: int) -> object:
        result = resize(storage, nbytes)
        ledger.recount(storage)
        return result

    torch.UntypedStorage.resize_ = seen  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def resident(name: str) -> int:
    """Return a line of this process' status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def compare(world: int, size: Size) -> list[dict]:
    """Return a row for each that trains on ``world`` ranks; the fullest rank counts."""
    elements = sum(parameter.numel() for parameter in build_model(size).parameters())
    rows: list[dict] = []
    for name, (stage, build) in entrants(world).items():
        ranks = run_processes(world, measure(build, size), timeout_s=600)
        fullest = max(ranks, key=lambda rank: rank["peak"])
        formula = stored_state(PrecisionBlock(), stage).bytes_per_parameter(stage, world)
        growth = max(rank["resident_growth"] for rank in ranks)
        row = {"ranks": world, "trainer": name, "formula": float(formula * elements)}
        rows.append(row | fullest | {"resident_growth": growth})
    peaks = {row["trainer"]: row["peak"] for row in rows}
    for row in rows:
        peer = COUNTERPART.get(row["trainer"])
        row["over_peer"] = row["peak"] / peaks[peer] if peer else None
    return rows


def report(rows: list[dict], size: Size) -> str:
    """Return the table as text."""
    keys = ("formula", "between", "peak", "resident_growth")
    cells = []
    for row in rows:
        megabytes = [f"{row[key] / 1e6:.1f}" for key in keys]
        ratio = f"{row['over_peer']:.2f}" if row["over_peer"] else ""
        cells.append([row["ranks"], row["trainer"], *megabytes, ratio, row["made_by"]])
    heads = ["ranks", "trainer", "formula MB", "between steps", "peak", "resident growth"]
    heads += ["peak / its FSDP2", "at the peak"]
    head = f"torch {torch.__version__}, {platform.machine()}, gloo, {size}"
    return f"{head}\n\n{tabulate(cells, heads, disable_numparse=True)}"


def same_losses(rows: list[dict]) -> bool:
    """Tell whether all rows trained one model."""
    first = rows[0]["losses"]
    pairs = (pair for row in rows for pair in zip(row["losses"], first, strict=True))
    return all(abs(a - b) <= 1e-4 * abs(b) for a, b in pairs)


def main() -> int:
    """Measure and print; 1 when losses differ, or ours holds more than its counterpart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--full", action="store_true", help="a model of 29.5 million parameters")
    sizes.add_argument("--quick", action="store_true", help="a tiny one, under a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    size = FULL if args.full else QUICK if args.quick else SHORT
    rows = [row for world in WORLDS for row in compare(world, size)]
    print(json.dumps({"rows": rows}, indent=1) if args.json else report(rows, size))
    is_more = any((row["over_peer"] or 0) > 1 for row in rows)
    return 0 if same_losses(rows) and not is_more else 1


if __name__ == "__main__":
    sys.exit(main())
