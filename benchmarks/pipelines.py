"""Compare our pipelines with torch.distributed.pipelining's, and bubbles measured with simulated.

    python benchmarks/pipelines.py [--quick] [--json]

Four gloo processes train one GPT (untied, float32, no optimizer) by our schedule and by torch's of
the same kind: same model, first values, batch, micro-batches and stages. A round is one step of
each, ours and theirs in turn; a ratio is ours / theirs within a round, below 1 where ours is
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
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from autoshard.compiler.pass_base import PassContext
from autoshard.dsl.load import load
from autoshard.dsl.resolve import resolve
from autoshard.frontend import compile_plan
from autoshard.ir.facts import describe
from autoshard.ir.program import Program
from autoshard.passes.lower_schedule import LowerSchedule
from autoshard.runtime.batch import split_leaves
from autoshard.runtime.comm import ProcessGroups
from autoshard.runtime.executor import Executable
from autoshard.runtime.link import link
from autoshard.schedule import place_stages
from autoshard.schedule.action import COMPUTE
from autoshard.schedule.costs import Costs
from autoshard.schedule.simulate import simulate
from autoshard.source import Source
from autoshard.testing.models import TinyGPT, token_batch, token_loss
from autoshard.testing.processes import run_processes

RANKS, LAYERS, CPU = 4, 8, torch.device("cpu")
PAIRS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
VIRTUAL = {"interleaved_1f1b": 2, "zbv": 2, "dualpipev": 2}
OURS = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_2p", "zbv", "dualpipev")


@dataclass(frozen=True)
class Size:
    """How much is computed and how often."""

    width: int
    length: int
    micro_batch: int
    microbatches: int
    rounds: int
    phase_s: float  # time that a phase of a whole rank sleeps for the idle table


FULL = Size(256, 128, 4, 8, 12, 0.06)
QUICK = Size(64, 32, 2, 8, 5, 0.03)


def model_and_batch(size: Size) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model with fixed first values, and a batch in which every label counts."""
    torch.manual_seed(0)
    model = TinyGPT(LAYERS, size.width, 4, 96, size.length, tied=False)
    batch = token_batch(size.micro_batch * size.microbatches, size.length, 96)
    return model, {"ids": batch["ids"], "labels": batch["ids"].roll(-1, 1)}


def plan_text(name: str, size: Size) -> str:
    """Return the plan of a schedule."""
    return f"""autoshard 1
mesh {{ pp = {RANKS} }}
batch {{ micro_batch_size = {size.micro_batch}, num_microbatches = {size.microbatches} }}
pipeline {{ split = even(h.*), schedule = {name}, virtual_stages = {VIRTUAL.get(name, 1)} }}
"""


@cache
def graphs(placement: tuple[int, ...], name: str, size: Size) -> Program:
    """Return the phases of a schedule's stages; others that place stages alike share them."""
    model, batch = model_and_batch(size)
    plan = load(Source("benchmark.plan", plan_text(name, size))).require()
    return compile_plan(
        model, plan, batch, token_loss, check=False, until="release-gathers"
    ).program


def compiled(name: str, size: Size) -> Executable:
    """Return our program of a schedule, linked for this process."""
    model, _ = model_and_batch(size)
    placement = place_stages(name, RANKS, VIRTUAL.get(name))
    alike = next(n for n in OURS if place_stages(n, RANKS, VIRTUAL.get(n)) == placement)
    program = replace(graphs(placement, alike, size))
    plan = load(Source("benchmark.plan", plan_text(name, size))).require()
    LowerSchedule().run(program, PassContext(resolve(plan, describe(model))))
    exe = link(program, ProcessGroups(program.mesh, dist.get_rank(), CPU))
    for fqn, value in model.state_dict().items():
        exe.storage.write(fqn, value)
    return exe


def our_step(exe: Executable, size: Size) -> Callable[[], float]:
    """Return a function that runs one of our steps and returns the loss."""
    parts = split_leaves(model_and_batch(size)[1], exe.program.leaves, size.microbatches)

    def step() -> float:
        for parameter in exe.storage.parameters.values():
            parameter.grad = None
        return exe.step(parts).item()

    return step


class Part(nn.Module):
    """One stage of the same GPT as a module, as torch's pipelining wants it."""

    def __init__(self, model: TinyGPT, index: int, count: int) -> None:
        """Take over every ``count``-th part of the blocks, and what stands at either end."""
        super().__init__()
        share = LAYERS // count
        self.first, self.last = index == 0, index == count - 1
        self.h = model.h[index * share : (index + 1) * share]
        if self.first:
            self.wte, self.wpe = model.wte, model.wpe
        if self.last:
            self.ln_f, self.head = model.ln_f, model.head

    def forward(self, x: Tensor) -> Tensor:
        """Compute the stage's share of the model."""
        if self.first:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x)) if self.last else x


def torch_step(name: str, size: Size) -> Callable[[], float]:
    """Return a function that runs one step of torch's schedule and returns the loss."""
    virtual, rank = VIRTUAL.get(name, 1), dist.get_rank()
    count = RANKS * virtual
    chosen = {1: (rank,), 2: (rank, rank + RANKS)}[virtual]
    if name in ("zbv", "dualpipev"):
        chosen = (rank, count - 1 - rank)
    model, batch = model_and_batch(size)
    parts = [Part(model, index, count) for index in chosen]
    stages = [PipelineStage(p, i, count, CPU) for p, i in zip(parts, chosen, strict=True)]
    make = getattr(schedules, PAIRS[name])
    given = stages[0] if virtual == 1 else stages

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return token_loss(output, {"labels": labels})

    schedule = make(given, size.microbatches, loss_fn=loss)
    inputs = (batch["ids"],) if 0 in chosen else ()
    is_last = count - 1 in chosen

    def step() -> float:
        for part in parts:
            part.zero_grad()
        losses: list[Tensor] = []
        target = batch["labels"] if is_last else None
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        total = torch.stack(losses).mean() if is_last else torch.zeros(())
        dist.broadcast(total, 0 if name in ("zbv", "dualpipev") else RANKS - 1)
        return total.item()

    return step


def seconds(step: Callable[[], float]) -> float:
    """Return the time from when all ranks begin a step to when all have ended it."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def compare(name: str, exe: Executable, size: Size) -> dict[str, object]:
    """Return losses, times and ratios of one schedule, ours and torch's in turn."""
    ours, theirs = our_step(exe, size), torch_step(name, size)
    losses = [ours(), theirs()]
    ours(), theirs()  # warm up
    pairs = []
    for turn in range(size.rounds):
        first, second = (ours, theirs) if turn % 2 == 0 else (theirs, ours)
        a, b = seconds(first), seconds(second)
        pairs.append((a, b) if turn % 2 == 0 else (b, a))
    ratios = sorted(a / b for a, b in pairs)
    return {
        "schedule": name,
        "torch": PAIRS[name],
        "losses": losses,
        "ours_ms": 1000 * statistics.median(a for a, _ in pairs),
        "torch_ms": 1000 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
    }


def idle(exe: Executable, size: Size) -> dict[str, object]:
    """Return the measured idle share of a step in which each phase sleeps, and the simulated."""
    share = size.phase_s / exe.program.schedule.virtual_stages
    code = exe.code
    exe.code = {key: replace(p, call=_slow(p.call, share)) for key, p in code.items()}
    step = our_step(exe, size)
    step()
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    whole = time.perf_counter() - start
    exe.code = code
    busy = sum(d.end - d.start - d.waited for d in exe.trace if d.actions[0].kind in COMPUTE)
    total = torch.tensor(busy)
    dist.all_reduce(total)
    costs = Costs(1, 1, 1)
    simulated = simulate(exe.program.schedule, costs)
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


def measure(size: Size) -> Callable[[int], dict]:
    """Return what every process does."""

    def body(rank: int) -> dict:
        found: dict[str, list] = {"steps": [], "idle": []}
        for name in OURS:
            exe = compiled(name, size)
            if name in PAIRS:
                found["steps"].append(compare(name, exe, size))
            found["idle"].append(idle(exe, size))
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
            f"gloo processes, {LAYERS} layers, {size}",
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
    size = QUICK if args.quick else FULL
    ranks = run_processes(RANKS, measure(size), timeout_s=900)
    found = ranks[0]
    if args.json:
        print(json.dumps({"size": asdict(size), "torch": torch.__version__, **found}, indent=2))
    else:
        print(report(found, size))
    same = all(abs(a - b) < 1e-4 for a, b in (row["losses"] for row in found["steps"]))
    ordered = all(row["order_as_simulated"] for rank in ranks for row in rank["idle"])
    return 0 if same and ordered else 1


if __name__ == "__main__":
    sys.exit(main())
