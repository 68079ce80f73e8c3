"""Commands that need no model answer without torch, because importing it takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAN = "examples/plans/llama3-70b.plan"
SCRIPT = """
import sys
from autoshard.cli import main
code = main(sys.argv[1:])
heavy = sorted({"torch", "numpy", "transformers"} & set(sys.modules))
assert not heavy, heavy
sys.exit(code)
"""


def run(*words: str) -> subprocess.CompletedProcess:
    """Run a command in a process of its own that fails when it imported something heavy."""
    command = [sys.executable, "-c", SCRIPT, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("plan", "--help"),
        ("plan", "check", PLAN, "--world", "256"),
        ("plan", "fmt", "--check", PLAN),
        ("plan", "doc", "zero"),
        ("explain", "AS304"),
        ("inspect", "--zero-table", "7.5B"),
        ("simulate", "--schedule", "1f1b", "--stages", "4", "--microbatches", "8"),
        ("cache",),
    ],
    ids=" ".join,
)
def test_a_command_without_a_model_imports_no_torch(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert done.returncode == 0, done.stderr


def test_the_python_twin_imports_no_torch() -> None:
    script = (
        "import sys, autoshard; autoshard.Plan(mesh={'tp': 2}); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=120)
    assert done.returncode == 0


def test_the_check_would_notice_torch() -> None:
    script = SCRIPT.replace("from autoshard", "import torch\nfrom autoshard")
    command = [sys.executable, "-c", script, "explain", "AS304"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "AssertionError: ['numpy', 'torch']" in done.stderr or "['torch']" in done.stderr
