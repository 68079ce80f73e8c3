"""Measure what a step costs beside its arithmetic, and how much of its communication is hidden.

    python benchmarks/overhead.py [--quick] [--json]

Python: a GPT so narrow that arithmetic is next to nothing trains on one rank; CPU time of a step
is divided by the operators that it calls, and put beside eager's. Actions: the same GPT on two
ranks of a pipeline; per action, the CPU time of its thread that is not generated code.

Overlap can't be seen in seconds where ranks share cores with their messages. So every gather and
reduction of ZeRO-3 is made to take at least 20 ms, and what a rank still waits of that is summed:
nothing of it if all is hidden. FSDP2 gets the same delay in its collectives. A wider model,
whose units compute about as long as a collective takes, shows what depth does to a narrow one.
Tensor parallelism is measured with and without the pass that moves its collectives.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tabulate import tabulate

from autoshard.passes.overlap_collectives import OverlapCollectives
from autoshard.runtime import gloo
from autoshard.runtime.run import Run
from autoshard.runtime.work import Pending
from autoshard.testing.processes import run_processes
from benchmarks.config import PLANS, SHORT, Size, zero
from benchmarks.peers import build, fsdp2
from benchmarks.peers.ours import build_engine

NARROW = Size(12, 8, 2, 64, 8, 8, 4, 1, 1)
MIDDLE = Size(6, 128, 4, 512, 64, 8, 4, 1, 1)
DELAY_S = 0.02
KEPT = {"narrow": "1200KiB", "wide": "6MiB"}  # a block and the head: over the turn to backward
DEPTHS = ("prefetch = 0", "prefetch = 1", "prefetch = 2")
DELAYED = ("all_gather", "reduce_scatter")  # and sums over tp


class Waits:
    """Seconds of injected delay that a rank did not hide, and the operations that were delayed."""

    seconds, count = 0.0, 0

    @classmethod
    def until(cls, due: float) -> None:
        """Sleep until a collective may end."""
        pause = max(0.0, due - time.perf_counter())
        cls.seconds, cls.count = cls.seconds + pause, cls.count + 1
        time.sleep(pause)


class Late(Pending):
    """A collective of ours that takes longer."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._due = time.perf_counter() + DELAY_S

    def wait(self) -> torch.Tensor:
        """Wait no less than the delay since it was started."""
        is_sum = self._what.startswith("all_reduce") and "'tp'" in self._what
        if self._value is None and (is_sum or self._what.startswith(DELAYED)):
            Waits.until(self._due)
        return super().wait()


class LateWorks(fsdp2.Works):
    """A collective of FSDP2 that takes longer."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._due = time.perf_counter() + DELAY_S

    def wait(self) -> bool:
        """Wait no less than the delay since it was started."""
        if self._works:  # not waited for before
            Waits.until(self._due)
        return super().wait()


@dataclass(frozen=True)
class Hidden:
    """Something to train with delayed collectives."""

    size: Size
    trainer: str  # as `benchmarks.peers.build` names it
    is_whole: bool = False  # without `overlap-collectives`


def exposed(steps: int, is_quick: bool) -> Callable[[int], dict]:
    """Return what each rank does: the seconds a step that are not hidden, by what is trained."""
    rows: dict[str, Hidden] = {}
    for name, size in {"narrow": MIDDLE, "wide": SHORT}.items():
        if name == "wide" and is_quick:
            continue
        for more in (*DEPTHS, f"prefetch = 1, keep_gathered = {KEPT[name]}"):
            plan = f"zero 3, {more}"
            PLANS[plan] = zero(3, more=f", {more}")
            rows[f"{name}: {plan}"] = Hidden(size, f"ours: {plan}")
        rows[f"{name}: fsdp2, messages"] = Hidden(size, "fsdp2, messages")
        for kind in ("tp", "tp sp"):
            rows[f"{name}: {kind}, moved"] = Hidden(size, f"ours: {kind}")
            rows[f"{name}: {kind}, whole"] = Hidden(size, f"ours: {kind}", True)

    def body(rank: int) -> dict:
        gloo.Pending, fsdp2.Works = Late, LateWorks  # type: ignore[misc]
        return {name: _exposed(row, steps) for name, row in rows.items()}

    return body


def _exposed(row: Hidden, steps: int) -> dict[str, float]:
    with mock.patch.object(OverlapCollectives, "run") if row.is_whole else nullcontext():
        trainer = build(row.trainer, row.size)
    trainer.step(0)
    Waits.seconds, Waits.count = 0.0, 0
    for number in range(steps):
        trainer.step(number)
    return {
        "exposed_ms": 1000 * Waits.seconds / steps,
        "delayed_ms": 1000 * DELAY_S * Waits.count / steps,
    }


def python_time(steps: int) -> Callable[[int], dict]:
    """Return what one process does: CPU seconds of a step without the optimizer, ours and eager."""

    def body(rank: int) -> dict:
        engine, batch = build_engine(NARROW, PLANS["one rank"])
        plain = build("eager", NARROW)
        ours = _median_cpu(lambda: (engine.forward_backward(batch(0)), engine.zero_grad()), steps)
        calls = engine.stats()["launches"]
        eager = _median_cpu(lambda: plain.step(0), steps)
        return {
            "operators": calls,
            "us_per_operator": 1e6 * ours / calls,
            "ours_ms": 1e3 * ours,
        } | {"eager_with_optimizer_ms": 1e3 * eager}

    return body


def action_time(steps: int) -> Callable[[int], dict]:
    """Return what each rank of a pipeline does: microseconds beside generated code, by action."""

    def body(rank: int) -> dict:
        engine, batch = build_engine(NARROW, PLANS["1f1b"])
        engine.forward_backward(batch(0))
        (exe,) = engine._programs.values()
        code, whole = [0.0], [0.0]
        exe.code = {k: replace(p, call=_timed(p.call, code)) for k, p in exe.code.items()}
        Run.actions = _timed(Run.actions, whole)  # type: ignore[method-assign]
        found = []
        for number in range(steps):
            code[0] = whole[0] = 0.0
            engine.forward_backward(batch(number))
            engine.zero_grad()
            found.append((whole[0] - code[0]) / engine.stats()["actions"])
        return {
            "actions": engine.stats()["actions"],
            "us_per_action": 1e6 * statistics.median(found),
        }

    return body


def _timed(call: Callable, spent: list[float]) -> Callable:
    def timed(*args: object) -> object:
        start = time.thread_time()
        results = call(*args)
        spent[0] += time.thread_time() - start
        return results

    return timed


def _median_cpu(work: Callable[[], object], steps: int) -> float:
    work(), work()
    found = []
    for _ in range(steps):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return statistics.median(found)


def report(found: dict) -> str:
    """Return the figures as text."""
    code, actions = found["python"], found["actions"]
    rows = [
        [
            name,
            f"{row['delayed_ms']:.0f}",
            f"{row['exposed_ms']:.0f}",
            f"{row['exposed_ms'] / row['delayed_ms']:.0%}",
        ]
        for name, row in found["overlap"].items()
    ]
    return "\n".join(
        [
            f"{code['us_per_operator']:.1f} us of CPU an operator: {code['operators']} of them in"
            f" {code['ours_ms']:.1f} ms; a whole eager step takes"
            f" {code['eager_with_optimizer_ms']:.1f} ms",
            f"{actions['us_per_action']:.0f} us of CPU an action beside its code,"
            f" {actions['actions']} actions a rank",
            "",
            tabulate(
                rows, ["", "ms injected a step", "ms exposed", "of that"], disable_numparse=True
            ),
        ]
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    steps = 5 if args.quick else 20
    found = {
        "python": run_processes(1, python_time(steps), 200)[0],
        "actions": run_processes(2, action_time(steps), 200)[0],
        "overlap": run_processes(2, exposed(max(2, steps // 4), args.quick), 400)[0],
    }
    print(json.dumps(found, indent=1) if args.json else report(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
