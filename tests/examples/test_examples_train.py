"""The examples train in parallel to the curve of plain PyTorch, under real gloo processes."""

import json
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.loading import ENVIRONMENT, EXAMPLES, ROOT

STEPS = 10
LARGEST_DIFFERENCE = 1e-5  # relative, float32
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
HF = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


def losses(folder: Path, launcher: tuple[str, ...], script: str, *words: str) -> list[float]:
    """Return the curve that one run of a training script saves."""
    saved = folder / "losses.json"
    command = [sys.executable, *launcher, EXAMPLES / script, *words]
    command += ["--steps", str(STEPS), "--save", saved]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(saved.read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory):
    """Return a function from a script and its model words to the curve of plain PyTorch."""

    @cache
    def curve(script: str, *words: str) -> list[float]:
        return losses(tmp_path_factory.mktemp("plain"), (), script, *words, "--plan", "none")

    return curve


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("script", "model", "plan", "ranks"),
    [
        ("gpt/train.py", (), "gpt/plans/pp2-tp2", 4),
        ("gpt/train.py", (), "gpt/plans/dp2-zero3", 2),
        pytest.param("hf/train.py", ("--model", "llama"), "hf/plans/llama-pp2", 2, marks=HF),
    ],
    ids=lambda value: value if isinstance(value, str) and "plans" in value else "",
)
def test_the_parallel_curve_is_the_plain_one(
    plain, tmp_path: Path, script: str, model: tuple[str, ...], plan: str, ranks: int
) -> None:
    words = (*model, "--plan", str(EXAMPLES / f"{plan}.plan"))
    found = losses(tmp_path, (*TORCHRUN, str(ranks)), script, *words)
    differences = [abs(a - b) / b for a, b in zip(found, plain(script, *model), strict=True)]
    assert max(differences) <= LARGEST_DIFFERENCE


@pytest.mark.distributed
def test_without_enough_processes_training_stops_and_says_how_to_start_it() -> None:
    command = [sys.executable, EXAMPLES / "gpt/train.py", "--plan", EXAMPLES / "gpt/plans/tp2.plan"]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "--nproc-per-node 2" in done.stderr
