"""Measure ZeRO 3 with and without prefetch, and gathered once, beside FSDP2 in the same ways.

    python benchmarks/zero.py [--quick] [--json]

Two gloo processes build all that is compared; the losses of their first steps must be those of one
process. Then everyone takes a turn a round, every other round in reverse order (`rounds`). A ratio
is taken within a round: median [least, most], below 1 where ours is faster. The floor is each
rank's share of the work without any communication. FSDP2 is measured with gloo's collectives and,
with our means, with ones made of messages: gloo's own reduce-scatter moves twice the bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from autoshard.testing.processes import run_processes
from benchmarks.config import QUICK, SHORT, Launch, Row
from benchmarks.rounds import run_launch
from benchmarks.table import cores_used, figures, rows, text

RANKS = 2
LAUNCH = Launch(
    "zero",
    RANKS,
    (
        Row("zero 3", "fsdp2"),
        Row("zero 3", "fsdp2, messages"),
        Row("zero 3", "ours: zero 3, no prefetch"),
        Row("zero 3 kept", "fsdp2 kept"),
        Row("zero 3 kept", "fsdp2 kept, messages"),
        Row("zero 3 kept", "ddp"),
    ),
)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, under a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    size = QUICK if args.quick else SHORT
    load = os.getloadavg()[0]
    measured = run_processes(RANKS, lambda rank: run_launch(LAUNCH, size, False), timeout_s=900)
    found = figures(measured)
    table = rows(LAUNCH, found)
    if args.json:
        print(json.dumps({"size": asdict(size), "load": load, "rows": table}, indent=1))
        return 0
    print(
        f"torch {torch.__version__}, {platform.machine()}, gloo, {size}\n"
        f"load {load:.1f} before, {cores_used(found):.2f} cores used; first losses "
        + " ".join(f"{loss:.5f}" for loss in measured[0]["expected"]),
        text(table),
        sep="\n\n",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
