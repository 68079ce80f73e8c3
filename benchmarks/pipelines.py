"""Compare our pipelines with torch.distributed.pipelining's, and bubbles measured with simulated.

    python benchmarks/pipelines.py [--quick] [--json]

Four gloo processes train the GPT of all benchmarks (float32, AdamW) by our schedule and by torch's
of the same kind: same model, first values, batches, micro-batches and stages. A round is one step
of each, ours and theirs in turn; a ratio is ours / theirs within a round, below 1 where ours is
faster: median [least, most]. Losses are compared first. The processes share the machine's cores,
so times say how much work a step is rather than how well ranks overlap.

Idle time is therefore measured in another way: each phase sleeps for a fixed time, so that cores
don't matter, and the share of a step in which a rank does nothing is put beside the simulator's
step bubble.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor

from autoshard.compiler.pass_base import PassContext
from autoshard.dsl.load import load
from autoshard.dsl.resolve import resolve
from autoshard.frontend import compile_plan
from autoshard.ir.facts import describe
from autoshard.ir.program import Program
from autoshard.passes.lower_schedule import LowerSchedule
from autoshard.plan import Plan
from autoshard.runtime.batch import split_leaves
from autoshard.runtime.comm import ProcessGroups
from autoshard.runtime.executor import Executable
from autoshard.runtime.link import link
from autoshard.schedule import place_stages
from autoshard.schedule.action import COMPUTE
from autoshard.schedule.costs import Costs
from autoshard.schedule.simulate import simulate
from autoshard.source import Source
from autoshard.testing.processes import run_processes
from benchmarks.config import SPLIT, Ours, Size
from benchmarks.peers import build
from benchmarks.peers.model import adamw, build_model, global_batch
from benchmarks.peers.ours import batch_loss
from benchmarks.peers.trainer import Trainer

RANKS, CPU = 4, torch.device("cpu")
PAIRS = {
    "gpipe": "torch GPipe",
    "1f1b": "torch 1F1B",
    "interleaved_1f1b": "torch Interleaved1F1B",
    "zb_h1": "torch InterleavedZeroBubble",
    "zbv": "torch ZBVZeroBubble",
    "dualpipev": "torch DualPipeV",
}
VIRTUAL = {"interleaved_1f1b": 2, "zbv": 2, "dualpipev": 2}
OURS = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_2p", "zbv", "dualpipev")


@dataclass(frozen=True)
class Scale:
    """What is computed, and the time that a phase of a whole rank sleeps for the idle table."""

    size: Size
    phase_s: float


FULL = Scale(Size(8, 256, 4, 96, 128, 32, 8, 12, 1), 0.06)
QUICK = Scale(Size(8, 64, 4, 96, 32, 16, 8, 5, 1), 0.03)


def plan_of(name: str, size: Size) -> Plan:
    """Return the plan of a schedule."""
    split = SPLIT.format(schedule=name, virtual=VIRTUAL.get(name, 1))
    return load(Source("benchmark.plan", Ours({"pp": RANKS}, split).text(size))).require()


@cache
def graphs(placement: tuple[int, ...], name: str, size: Size) -> Program:
    """Return the phases of a schedule's stages; others that place stages alike share them."""
    ids, labels = global_batch(size, 0)
    batch = {"ids": ids, "labels": labels}
    return compile_plan(
        build_model(size), plan_of(name, size), batch, batch_loss, check=False,
        until="release-gathers",
    ).program  # fmt: skip


def compiled(name: str, size: Size) -> Executable:
    """Return our program of a schedule, linked for this process."""
    model = build_model(size)
    placement = place_stages(name, RANKS, VIRTUAL.get(name))
    alike = next(n for n in OURS if place_stages(n, RANKS, VIRTUAL.get(n)) == placement)
    program = replace(graphs(placement, alike, size))
    LowerSchedule().run(program, PassContext(resolve(plan_of(name, size), describe(model))))
    exe = link(program, ProcessGroups(program.mesh, dist.get_rank(), CPU))
    for fqn, value in model.state_dict().items():
        exe.storage.write(fqn, value)
    return exe


def our_parts(exe: Executable, size: Size, number: int) -> list[dict[str, Tensor]]:
    """Return the micro-batches of a step."""
    ids, labels = global_batch(size, number)
    return split_leaves({"ids": ids, "labels": labels}, exe.program.leaves, size.microbatches)


def ours(exe: Executable, size: Size) -> Trainer:
    """Return what trains by our program."""
    optimizer = adamw(list(exe.storage.parameters.values()))

    def step(number: int) -> Tensor:
        loss = exe.step(our_parts(exe, size, number))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Trainer(step, Tensor.item)


def seconds(step: Callable[[int], object], number: int) -> float:
    """Return the time from when all ranks begin a step to when all have ended it."""
    dist.barrier()
    start = time.perf_counter()
    step(number)
    dist.barrier()
    return time.perf_counter() - start


def compare(name: str, exe: Executable, size: Size) -> dict[str, object]:
    """Return losses, times and ratios of one schedule, ours and torch's in turn."""
    trainers = ours(exe, size), build(PAIRS[name], size)
    losses = [t.loss(t.step(0)) for t in trainers]
    later = [t.loss(t.step(1)) for t in trainers]  # and warm up
    pairs = []
    for turn in range(size.rounds):
        order = trainers if turn % 2 == 0 else trainers[::-1]
        took = [seconds(t.step, 2 + turn) for t in order]
        pairs.append(took if turn % 2 == 0 else took[::-1])
    ratios = sorted(a / b for a, b in pairs)
    return {
        "schedule": name,
        "torch": PAIRS[name].removeprefix("torch "),
        "losses": losses,
        "losses_after_a_step": later,
        "ours_ms": 1000 * statistics.median(a for a, _ in pairs),
        "torch_ms": 1000 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
    }


def idle(exe: Executable, scale: Scale) -> dict[str, object]:
    """Return the measured idle share of a step in which each phase sleeps, and the simulated."""
    share = scale.phase_s / exe.program.schedule.virtual_stages
    code = exe.code
    exe.code = {key: replace(p, call=_slow(p.call, share)) for key, p in code.items()}
    parts = our_parts(exe, scale.size, 0)
    exe.step(parts)
    whole = seconds(lambda number: exe.step(parts), 1)
    exe.code = code
    busy = sum(d.end - d.start - d.waited for d in exe.trace if d.actions[0].kind in COMPUTE)
    total = torch.tensor(busy)
    dist.all_reduce(total)
    simulated = simulate(exe.program.schedule, Costs(1, 1, 1))
    return {
        "schedule": exe.program.schedule.name,
        "measured": 1 - total.item() / (RANKS * whole),
        "simulated": float(simulated.step_bubble),
        "order_as_simulated": _order(exe) == [t.action for t in simulated.ranks[dist.get_rank()]],
    }


def _slow(call: Callable, duration_s: float) -> Callable:
    def slowly(*args: object) -> object:
        start = time.perf_counter()
        results = call(*args)
        time.sleep(max(0.0, duration_s - (time.perf_counter() - start)))
        return results

    return slowly


def _order(exe: Executable) -> list:
    """Return the compute actions that this rank has carried out, in order."""
    return [a for done in exe.trace for a in done.actions if a.kind in COMPUTE]


def measure(scale: Scale) -> Callable[[int], dict]:
    """Return what every process does."""

    def body(rank: int) -> dict:
        found: dict[str, list] = {"steps": [], "idle": []}
        for name in OURS:
            exe = compiled(name, scale.size)
            if name in PAIRS:
                found["steps"].append(compare(name, exe, scale.size))
            found["idle"].append(idle(exe, scale))
        return found

    return body


def report(found: dict, size: Size) -> str:
    """Return both tables as text."""
    steps = [
        [
            row["schedule"],
            row["torch"],
            f"{row['ours_ms']:.1f}",
            f"{row['torch_ms']:.1f}",
            f"{row['ratio']:.2f} [{row['least']:.2f}, {row['most']:.2f}]",
            f"{row['losses'][0]:.6f} {row['losses'][1]:.6f}",
        ]
        for row in found["steps"]
    ]
    bubbles = [
        [row["schedule"], f"{row['simulated']:.1%}", f"{row['measured']:.1%}"]
        for row in found["idle"]
    ]
    heads = ["ours", "torch's", "ours ms", "torch ms", "ratio", "losses"]
    return "\n\n".join(
        [
            f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {RANKS} "
            f"gloo processes, {size}",
            tabulate(steps, heads, disable_numparse=True),
            tabulate(bubbles, ["schedule", "step bubble, F = I = W", "measured idle"]),
        ]
    )


def main() -> int:
    """Measure and print; 1 when losses differ or a rank did other than simulated."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model, under a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    scale = QUICK if args.quick else FULL
    ranks = run_processes(RANKS, measure(scale), timeout_s=900)
    found = ranks[0]
    if args.json:
        print(json.dumps({**asdict(scale), "torch": torch.__version__, **found}, indent=2))
    else:
        print(report(found, scale.size))
    pairs = [row[key] for row in found["steps"] for key in ("losses", "losses_after_a_step")]
    same = all(abs(a - b) < 1e-4 for a, b in pairs)
    ordered = all(row["order_as_simulated"] for rank in ranks for row in rank["idle"])
    return 0 if same and ordered else 1


if __name__ == "__main__":
    sys.exit(main())
