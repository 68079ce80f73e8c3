"""Measure the fused norm kernels against a copy of the same bytes, eager torch and torch.compile.

    python benchmarks/kernels.py [--quick | --sizes ROWSxHIDDEN ...] [--json] [--threads N]
                                 [--device cpu|cuda] [--no-compile]

Every competitor of a row runs in turn, round after round, in one process; ratios are medians over
rounds of times taken in the same round, shares of the copy compare the best times.  With one
thread the clock is the thread's CPU time, which other jobs on the machine disturb least.  Results
are compared with eager before anything is timed.

"Bytes" are those that the fused kernel must move: 4 units of rows x hidden elements, 5 for the
backward with dropout (see csrc/add_layer_norm.h).  Eager moves 5 to 9.25 units.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch._functorch.config
from tabulate import tabulate
from torch import Tensor
from torch.nn import functional

from autoshard.ops import add_layer_norm, add_rms_norm, native
from autoshard.ops import bias_dropout_add_layer_norm as fused_dropout
from autoshard.ops.dropout import dropout
from autoshard.ops.library import spec
from autoshard.ops.one_rank import OneRank
from benchmarks.kernel_calls import dispatch

EPS = 1e-5
P = 0.1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FULL = ((16_384, 768), (4096, 1024), (1024, 4096), (4096, 4096), (16_384, 4096), (1024, 16_384))
QUICK = ((4096, 1024),)
# Large blocks come from the heap and stay there.  Otherwise every result is fresh pages from the
# system, and clearing those costs more than any kernel, ours and eager's alike.
KEEP_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(1 << 40), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}

Run = Callable[[], object]


@dataclass(frozen=True)
class Job:
    """One row of the table: what ours does and who else does it."""

    name: str
    units: int  # of rows x hidden elements that the fused kernel moves
    ours: Run
    others: dict[str, Run]


@dataclass(frozen=True)
class Row:
    """What was measured for one job."""

    job: str
    dtype: str
    rows: int
    hidden: int
    megabytes: float
    gigabytes_per_s: float
    share_of_copy: float  # best copy time / our best time
    speedup: dict[str, float]  # competitor -> its time / ours, median over rounds


class Problem:
    """Tensors of one size and dtype, and the jobs on them."""

    def __init__(self, rows: int, hidden: int, dtype: torch.dtype, device: str) -> None:
        """Draw all inputs."""
        torch.manual_seed(0)
        self.hidden = hidden

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape).to(device, dtype)

        self.x, self.residual, self.dy, self.ds = (draw(rows, hidden) for _ in range(4))
        self.weight, self.bias, self.input_bias = (draw(hidden) for _ in range(3))
        self.copies = torch.empty_like(self.x), torch.empty_like(self.x)
        self.rng = torch.tensor([1, 2, 3], device=device)

    def copy(self) -> None:
        """Move 4 units: read two tensors, write two."""
        self.copies[0].copy_(self.x)
        self.copies[1].copy_(self.residual)

    def jobs(self, compiles: bool) -> list[Job]:
        """Return the table's rows for this problem."""
        return [*self._norm_jobs(compiles), *self._dropout_jobs(compiles)]

    def _norm_jobs(self, compiles: bool) -> list[Job]:
        def layer_norm(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            s = x + residual
            return functional.layer_norm(s, (x.shape[-1],), w, b, EPS), s

        def rms_norm(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            s = x + residual
            return functional.rms_norm(s, (x.shape[-1],), w, EPS), s

        w, b = self.weight, self.bias
        inputs = (self.x, self.residual, w, b)
        y, s, mean, rstd = add_layer_norm.forward(*inputs, EPS)
        _check(y, layer_norm(*inputs)[0])
        _, _, rms = add_rms_norm.forward(self.x, self.residual, w, EPS)

        def ln_forward() -> object:
            return add_layer_norm.forward(*inputs, EPS)

        def ln_backward() -> object:
            return add_layer_norm.backward(self.dy, self.ds, s, mean, rstd, w, True)

        def rms_forward() -> object:
            return add_rms_norm.forward(self.x, self.residual, w, EPS)

        def rms_backward() -> object:
            return add_rms_norm.backward(self.dy, self.ds, s, rms, w)

        return [
            *self._three("add+LN", ln_forward, ln_backward, layer_norm, inputs, compiles),
            *self._three("add+RMS", rms_forward, rms_backward, rms_norm, inputs, compiles),
        ]

    def _three(
        self,
        name: str,
        forward: Run,
        backward: Run,
        plain: Callable[..., tuple[Tensor, Tensor]],
        inputs: Sequence[Tensor],
        compiles: bool,
    ) -> list[Job]:
        rivals = {"eager": plain} | ({"compile": torch.compile(plain)} if compiles else {})
        ways = {rival: self._ways(function, inputs) for rival, function in rivals.items()}
        ours = (forward, backward, lambda: (forward(), backward()))
        units = (4, 4, 8)
        return [
            Job(f"{name} {what}", units[i], ours[i], {r: way[i] for r, way in ways.items()})
            for i, what in enumerate(("forward", "backward", "both"))
        ]

    def _ways(
        self, function: Callable[..., tuple[Tensor, Tensor]], inputs: Sequence[Tensor]
    ) -> tuple[Run, Run, Run]:
        """Return forward, backward and both of a differentiable function."""
        leaves = [value.detach().clone().requires_grad_() for value in inputs]
        outputs = function(*leaves)
        seeds = (self.dy, self.ds)

        def forward() -> object:
            with torch.no_grad():
                return function(*inputs)

        def gradients(of: tuple[Tensor, ...], keep: bool) -> object:
            return torch.autograd.grad(of, leaves, seeds, retain_graph=keep, allow_unused=True)

        return (
            forward,
            lambda: gradients(outputs, True),
            lambda: gradients(function(*leaves), False),
        )

    def _dropout_jobs(self, compiles: bool) -> list[Job]:
        """Return bias + dropout + add + LN, forward and backward, against eager and compiled."""
        own_dropout = OwnDropout()

        def plain(p: float, own: bool) -> Callable[..., tuple[Tensor, Tensor]]:
            def function(
                x: Tensor, residual: Tensor, w: Tensor, b: Tensor, input_bias: Tensor
            ) -> tuple[Tensor, Tensor]:
                t = x + input_bias
                if own:
                    t = own_dropout(t, self.rng, p)
                elif p > 0:
                    t = functional.dropout(t, p)
                s = t + residual
                return functional.layer_norm(s, (self.hidden,), w, b, EPS), s

            return function

        inputs = (self.x, self.residual, self.weight, self.bias, self.input_bias)
        place = (7, 0, 1, (), (), (), (), ())

        def ours(p: float) -> Run:
            def both() -> object:
                y, s, mean, rstd = _FORWARD(
                    OneRank(), self.x, self.input_bias, self.residual, self.weight, self.bias, EPS,
                    self.rng, p, *place,
                )  # fmt: skip
                gradients = _BACKWARD(
                    OneRank(), self.dy, self.ds, s, mean, rstd, self.weight, True, True,
                    self.rng, p, *place,
                )  # fmt: skip
                return y, gradients

            return both

        _check(ours(P)()[0], plain(P, True)(*inputs)[0])
        with_p = {
            "eager": self._ways(plain(P, False), inputs)[2],
            "eager, own rng": self._ways(plain(P, True), inputs)[2],
        }
        without = {"eager": self._ways(plain(0.0, False), inputs)[2]}
        if compiles:
            with_p["compile"] = self._ways(torch.compile(plain(P, False)), inputs)[2]
            without["compile"] = self._ways(torch.compile(plain(0.0, False)), inputs)[2]
        return [
            Job("bias+dropout+add+LN both", 9, ours(P), with_p),
            Job("bias+add+LN both", 9, ours(0.0), without),
        ]


class OwnDropout:
    """Our dropout operator as a differentiable function, for eager composition."""

    def __call__(self, x: Tensor, rng: Tensor, p: float) -> Tensor:
        """Return the dropout of ``x``."""
        return _Dropout.apply(x, rng, p)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, rng: Tensor, p: float) -> Tensor:
        ctx.given = (rng, p)
        return _DROPOUT(OneRank(), x, rng, p, 7, 0)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None, None]:
        rng, p = ctx.given
        return _DROPOUT(OneRank(), gradient, rng, p, 7, 0), None, None


_DROPOUT = spec(dropout).run
_FORWARD = spec(fused_dropout.bias_dropout_add_layer_norm).run
_BACKWARD = spec(fused_dropout.backward).run


class Clock:
    """Times one call: CPU time of this thread, wall time, or time on the device."""

    def __init__(self, device: str, threads: int) -> None:
        """Choose the clock by where the work runs."""
        self.device = device
        self.now = time.thread_time if device == "cpu" and threads == 1 else time.perf_counter

    def __call__(self, run: Run, repeats: int) -> float:
        """Return the seconds of one call, averaged over ``repeats``."""
        self._wait()
        start = self.now()
        for _ in range(repeats):
            run()
        self._wait()
        return (self.now() - start) / repeats

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(problem: Problem, job: Job, clock: Clock, rounds: int) -> tuple[float, float, dict]:
    """Return our best time, the copy's best time, and each rival's median ratio to ours."""
    runs = {"copy": problem.copy, "ours": job.ours, **job.others}
    repeats = {}
    for name, run in runs.items():
        run()  # warm up, and compile
        repeats[name] = max(1, min(1000, int(0.01 / max(clock(run, 1), 1e-6))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        order = list(runs) if number % 2 == 0 else list(reversed(runs))
        for name in order:
            times[name].append(clock(runs[name], repeats[name]))
    ratios = {
        name: statistics.median(a / b for a, b in zip(times[name], times["ours"], strict=True))
        for name in job.others
    }
    return min(times["ours"]), min(times["copy"]), ratios


def table(args: argparse.Namespace) -> list[Row]:
    """Measure every size and dtype that the command line asks for."""
    clock = Clock(args.device, args.threads)
    rows = []
    for count, hidden in args.sizes:
        torch.compiler.reset()  # or later sizes would share one program of unknown sizes
        for name, dtype in DTYPES.items():
            problem = Problem(count, hidden, dtype, args.device)
            size = count * hidden * dtype.itemsize
            for job in problem.jobs(args.compile):
                ours, copy, ratios = measure(problem, job, clock, args.rounds)
                moved = job.units * size
                share = copy * job.units / 4 / ours
                rows.append(
                    Row(
                        job.name,
                        name,
                        count,
                        hidden,
                        moved / 1e6,
                        moved / ours / 1e9,
                        share,
                        ratios,
                    )
                )
                print(f"  {job.name} {name} {count}x{hidden}", file=sys.stderr)
    return rows


def report(args: argparse.Namespace) -> dict:
    """Return everything that was measured, and where."""
    load = os.getloadavg()[0]
    rows = table(args)
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, load {load:.1f} before",
        "torch": torch.__version__,
        "kernels": native.CPU.module.instruction_sets() if native.CPU.module else native.CPU.reason,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "threads": args.threads,
        "rows": [asdict(row) for row in rows],
        "dispatch_us": dispatch(args.rounds),
    }


def show(found: dict) -> None:
    """Print the report as tables."""
    print(", ".join(f"{key} {found[key]}" for key in ("machine", "torch", "kernels", "threads")))
    rivals = list(dict.fromkeys(name for row in found["rows"] for name in row["speedup"]))
    lines = [
        [row["job"], row["dtype"], f"{row['rows']}x{row['hidden']}", f"{row['megabytes']:.0f}"]
        + [f"{row['gigabytes_per_s']:.1f}", f"{row['share_of_copy']:.0%}"]
        + [f"{row['speedup'][r]:.2f}" if r in row["speedup"] else "" for r in rivals]
        for row in found["rows"]
    ]
    heads = ["", "dtype", "rows x hidden", "MB", "GB/s", "of copy", *(f"vs {r}" for r in rivals)]
    print(tabulate(lines, heads, disable_numparse=True))
    print("\none call on 8x16, microseconds:")
    print(tabulate([[name, f"{us:.1f}"] for name, us in found["dispatch_us"].items()]))


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one size, no torch.compile")
    parser.add_argument(
        "--sizes", nargs="+", type=_size, metavar="ROWSxHIDDEN", help="these sizes alone"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=0, help="default: 5 quick, else 9")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    if args.device == "cpu" and not KEEP_PAGES.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_PAGES)
    args.rounds = args.rounds or (5 if args.quick else 9)
    args.compile = args.compile and not args.quick
    args.sizes = args.sizes or (QUICK if args.quick else FULL)
    torch.set_num_threads(args.threads)
    torch._functorch.config.donated_buffer = False  # a backward is timed many times
    found = report(args)
    print(json.dumps(found)) if args.json else show(found)


def _size(text: str) -> tuple[int, int]:
    rows, hidden = text.split("x")
    return int(rows), int(hidden)


def _check(found: Tensor, expected: Tensor) -> None:
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
    main()
