"""The main job, end to end, on two CPU cores: what `make demo` runs.

It checks a plan, shows what the tensor pass does to one layer, verifies the parallel programs
against the plain model in one process, trains on four gloo processes (pp 2 x tp 2), and prints the
loss curve beside the one of plain PyTorch in one process.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLAN = "examples/gpt/plans/pp2-tp2.plan"
MODEL = "examples/gpt/model.py:build"
TRAIN = "examples/gpt/train.py"
STEPS = 60
LARGEST_DIFFERENCE = 1e-5  # relative, float32

# CPU and gloo are part of the promise; one thread a process keeps two cores free for four ranks.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
PYTHON = {
    "autoshard": ["-m", "autoshard"],
    "torchrun": ["-m", "torch.distributed.run"],
    "python": [],
}


def main() -> int:
    """Run the five parts and return 0 if the two curves agree."""
    start = time.perf_counter()
    run("check the plan", f"autoshard plan check {PLAN} --model {MODEL} --world 4")
    show_one_layer(f"autoshard inspect {PLAN} --model {MODEL} --pass tensor --diff")
    run("verify it, in this process", f"autoshard verify {PLAN} --model {MODEL}")
    with tempfile.TemporaryDirectory() as folder:
        plain, parallel = Path(folder, "plain.json"), Path(folder, "parallel.json")
        run("train in plain PyTorch", f"python {TRAIN} --plan none --steps {STEPS} --save {plain}")
        run(
            "train on four processes",
            f"torchrun --standalone --nproc-per-node 4 {TRAIN} --plan {PLAN} --steps {STEPS} "
            f"--save {parallel}",
        )
        curves = json.loads(plain.read_text()), json.loads(parallel.read_text())
    difference = compare(*curves)
    print(f"\nthe whole demo took {time.perf_counter() - start:.0f} s")
    return 0 if difference <= LARGEST_DIFFERENCE else 1


def run(title: str, command: str, keep: bool = False) -> str:
    """Run one command from the root of the checkout; stop the demo where it fails.

    With `keep` its output is returned instead of shown.
    """
    print(f"\n== {title}\n$ {command}", flush=True)
    program, *words = command.split()
    done = subprocess.run(
        [sys.executable, *PYTHON[program], *words],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE if keep else None,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"`{program}` ended with exit code {done.returncode}")
    return done.stdout or ""


def show_one_layer(command: str) -> None:
    """Run a diff of the whole model and print what it says about the layers that change alike."""
    lines = run("one layer before and after", command, keep=True).splitlines()
    start = next((i for i, line in enumerate(lines) if "(the same change in" in line), 0)
    rest = range(start + 1, len(lines))
    stop = next((i for i in rest if not lines[i].startswith(" ")), len(lines))
    print("\n".join(lines[start:stop]))
    print(f"... and {len(lines) - (stop - start)} lines about the rest of the model")


def compare(plain: list[float], parallel: list[float]) -> float:
    """Print the curves side by side and return their largest relative difference."""
    print("\n== the two curves\nstep   one process   pp 2 x tp 2   relative difference")
    differences = [abs(b - a) / abs(a) for a, b in zip(plain, parallel, strict=True)]
    for step, (a, b, difference) in enumerate(zip(plain, parallel, differences, strict=True), 1):
        if step == 1 or step % 10 == 0:
            print(f"{step:4d}   {a:11.7f}   {b:11.7f}   {difference:.1e}")
    largest = max(differences)
    verdict = "within" if largest <= LARGEST_DIFFERENCE else "MORE THAN"
    print(f"largest of {len(plain)} steps: {largest:.1e}, {verdict} {LARGEST_DIFFERENCE:.0e}")
    return largest


if __name__ == "__main__":
    raise SystemExit(main())
