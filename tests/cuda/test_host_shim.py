"""The CUDA kernels as threads of the host, under the address and the thread sanitizer.

The kernels' own source is compiled; nothing here needs a device.  Planted faults prove that the
harness sees what it is there to see.
"""

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "csrc"
ADDRESS = ("-fsanitize=address", "-O0")
# Optimised, because the race detector slows everything else down.
THREAD = ("-fsanitize=thread", "-O1")
SMALL = "-DONLY_FLOAT32"
TIMEOUT_S = 240
PROBE = "#include <barrier>\n#include <thread>\nint main() { std::thread([] {}).join(); }\n"


@dataclass(frozen=True)
class Fault:
    """One planted mistake: where, what it replaces, and what must be reported."""

    name: str
    file: str
    right: str
    wrong: str
    sanitizer: tuple[str, ...]
    report: str


FAULTS = [
    Fault(
        "one chunk too many",
        "norm_kernels.h",
        "if (chunk < chunks) body(k, chunk);",
        "if (chunk <= chunks) body(k, chunk);",
        ADDRESS,
        "heap-buffer-overflow",
    ),
    Fault(
        "one row too many",
        "norm_kernels.h",
        "if (row >= f.shape.rows) return;",
        "if (row > f.shape.rows) return;",
        ADDRESS,
        "heap-buffer-overflow",
    ),
    Fault(
        "workspace for two gradients of three",
        "norm_launch.h",
        "return kGradients * shape.hidden *",
        "return 2 * shape.hidden *",
        ADDRESS,
        "heap-buffer-overflow",
    ),
    Fault(
        "no barrier before the sums of the warps are read",
        "norm_kernels.h",
        "    __syncthreads();\n    const int warps",
        "    const int warps",
        THREAD,
        "data race",
    ),
    Fault(
        "one exchange buffer for two sums",
        "norm_kernels.h",
        "    turn ^= 1;\n",
        "",
        THREAD,
        "data race",
    ),
    Fault(
        "no barrier in the last sum",
        "norm_kernels.h",
        "= sum;\n  __syncthreads();",
        "= sum;",
        THREAD,
        "data race",
    ),
    Fault(
        "a warp sum that leaves half the lanes out",
        "norm_kernels.h",
        "int step = kWarp / 2;",
        "int step = kWarp / 4;",
        ADDRESS,
        "wrong y[",
    ),
    Fault(
        "the neighbour's random word",
        "norm_kernels.h",
        "pick(words, static_cast<int>(index & 3))",
        "pick(words, static_cast<int>(index + 1 & 3))",
        ADDRESS,
        "wrong s[",
    ),
]


@cache
def _obstacle(sanitizer: str) -> str:
    """Return why this machine can't build and run such a program, or nothing."""
    if shutil.which("g++") is None:
        return "g++ is not on PATH"
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "probe.cpp"), Path(folder, "probe")
        source.write_text(PROBE)
        for command in (
            ["g++", "-std=c++20", sanitizer, str(source), "-o", str(program), "-pthread"],
            [str(program)],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                words = done.stderr.strip().splitlines() or ["no words"]
                return f"no programs with {sanitizer} here: {words[-1]}"
    return ""


def _run(sources: Path, out: Path, *flags: str) -> str:
    """Compile the host program against ``sources`` with ``flags`` and return what a run prints."""
    sanitizer = flags[0]
    if _obstacle(sanitizer):
        pytest.skip(_obstacle(sanitizer))
    program = out / "host"
    where = [f"-I{sources}", f"-I{HERE}", str(HERE / "host_main.cpp"), "-o", str(program)]
    command = ["g++", "-std=c++20", "-g", *flags, "-Wno-unknown-pragmas", *where, "-pthread"]
    subprocess.run(command, check=True)
    run = subprocess.run([str(program)], capture_output=True, text=True, timeout=TIMEOUT_S)
    return run.stdout + run.stderr


def test_kernels_of_all_dtypes_are_right_and_stay_in_bounds(tmp_path: Path) -> None:
    assert _run(SOURCES, tmp_path, *ADDRESS) == "ok\n"


def test_kernels_have_no_data_races(tmp_path: Path) -> None:
    assert _run(SOURCES, tmp_path, *THREAD, SMALL) == "ok\n"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(fault: Fault, tmp_path: Path) -> None:
    broken = tmp_path / "csrc"
    shutil.copytree(SOURCES, broken)
    text = (broken / fault.file).read_text()
    assert text.count(fault.right) == 1, "the source has changed: plant the fault anew"
    (broken / fault.file).write_text(text.replace(fault.right, fault.wrong))
    assert fault.report in _run(broken, tmp_path, *fault.sanitizer, SMALL)
