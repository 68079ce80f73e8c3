"""Measure our training steps beside those of every peer, in one launch, by turns.

    python benchmarks/bench.py [--full | --quick] [--only NAME ...] [--json]

A launch starts the ranks of one world size and builds all that is compared in the same processes:
same model, first values, batches, optimizer and threads. The losses of the first steps must be
those of a single process. Then come rounds, in which each entrant runs once, every other round
in reverse order. Seconds are those of the slowest rank; a ratio is taken within a round and given
as median [least, most]; nobody is called faster when rounds disagree. Besides peers there are two
anchors: the floor, which is each rank's share of the work without communication, and DDP.

Bytes are what the loopback device carried, in a network namespace of the benchmark's own; where
the machine does not allow one they are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmarks.config import LAUNCHES, SIZES, Launch, Size
from benchmarks.rounds import run_launch
from benchmarks.table import cores_used, figures, rows, text

PRIVATE = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
BUSY = 1.2  # CPU seconds over seconds below which two ranks did not have two cores


def main() -> int:
    """Measure and print; 1 when a launch failed."""
    args = _arguments()
    size_name = "full" if args.full else "quick" if args.quick else "short"
    launches = [x for x in LAUNCHES if not args.only or x.name in args.only]
    if args.worker:
        _work(launches[0], SIZES[size_name], Path(args.worker), args.private)
        return 0
    is_private = _can_isolate()
    results = [measure(launch, size_name, is_private) for launch in launches]
    if args.json:
        print(json.dumps(_whole(results, size_name), indent=1))
    else:
        print(report(results, size_name))
    return 0


def measure(launch: Launch, size_name: str, is_private: bool) -> dict:
    """Start the ranks of a launch and return its rows, with the load before and after."""
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(launch.world), __file__, f"--{size_name}"]
        command += ["--only", launch.name, "--worker", folder]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if is_private:
            command = [*PRIVATE, *command, "--private"]
            env |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # no host names
        subprocess.run(command, check=True, env=env, stdout=sys.stderr)
        ranks = [json.loads((Path(folder) / str(i)).read_text()) for i in range(launch.world)]
    found = figures(ranks)
    return {
        "launch": launch.name,
        "rows": rows(launch, found),
        "figures": {name: asdict(item) for name, item in found.items()},
        "expected_losses": ranks[0]["expected"],
        "cores_used": cores_used(found),
        "load": [before, os.getloadavg()[0]],
    }


def _work(launch: Launch, size: Size, folder: Path, is_private: bool) -> None:
    """Be one rank of a launch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measured = run_launch(launch, size, is_private)
    (folder / os.environ["RANK"]).write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def report(results: list[dict], size_name: str) -> str:
    """Return the table as text, with what must be known to read it."""
    size = SIZES[size_name]
    lines = [
        f"{date.today()}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} CPU"
        f" cores, gloo; ours / peer below 1 where ours is faster",
        f"size '{size_name}': {size}",
        "",
        text([row for result in results for row in result["rows"]]),
        "",
    ]
    for result in results:
        busy = " (busy: don't quote these)" if _is_busy(result) else ""
        lines.append(
            f"{result['launch']}: load {result['load'][0]:.1f} before, {result['load'][1]:.1f}"
            f" after, {result['cores_used']:.2f} cores used{busy}; first losses "
            + " ".join(f"{loss:.5f}" for loss in result["expected_losses"])
        )
    return "\n".join(lines)


def _is_busy(result: dict) -> bool:
    return result["rows"][0]["ranks"] > 1 and result["cores_used"] < BUSY


def _whole(results: list[dict], size_name: str) -> dict:
    return {
        "date": str(date.today()),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "size_name": size_name,
        "size": asdict(SIZES[size_name]),
        "launches": results,
    }


def _can_isolate() -> bool:
    """Return whether this machine lets us have a network namespace of our own."""
    try:
        return subprocess.run([*PRIVATE, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--full", action="store_true", help="a model of 29.5 million parameters")
    sizes.add_argument("--short", action="store_true", help="one of 7.4 million (the default)")
    sizes.add_argument("--quick", action="store_true", help="a tiny one: all of it in a minute")
    names = [launch.name for launch in LAUNCHES]
    parser.add_argument("--only", nargs="+", choices=names, help="launches to run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # the folder for a rank's result
    parser.add_argument("--private", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
