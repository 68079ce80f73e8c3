"""ruff and mypy find nothing to say: what `make lint` runs."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("words", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_ruff_is_content(words: list[str]) -> None:
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed")
    command = [sys.executable, "-m", "ruff", *words, "--no-cache", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, "\n" + done.stdout + done.stderr


def test_mypy_is_content() -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    command = [ROOT / ".ci" / "typecheck", sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, "\n" + done.stdout[-8000:] + done.stderr
