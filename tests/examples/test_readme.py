"""What README.md shows is what happens."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.cli import COMMANDS, main
from tests.examples.loading import ENVIRONMENT, ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(?:python)?\n(.*?)```", README, re.DOTALL)


def block(start: str) -> str:
    """Return the one block of README.md that begins so."""
    (found,) = (text for text in BLOCKS if text.startswith(start))
    return found


@pytest.mark.distributed
def test_the_example_trains_on_two_processes(tmp_path: Path) -> None:
    (tmp_path / "two.plan").write_text(block("autoshard 1"))
    (tmp_path / "train.py").write_text(block("import torch"))
    torchrun, *words = block("torchrun").split()
    assert torchrun == "torchrun"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


def test_the_graph_before_and_after_is_what_inspect_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    command, *shown = block("$ autoshard inspect").splitlines()
    assert main(command.split()[2:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.strip() != "..." and line not in printed] == []


def test_every_command_is_named() -> None:
    assert [name for name in COMMANDS if f"autoshard {name}" not in README] == []


def test_every_file_named_exists() -> None:
    names = re.findall(r"`((?:docs|examples)/[\w/.-]*|[A-Z]+\.md)`", README)
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_verdict_shown_is_the_one_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    command, *shown = block("$ autoshard verify").splitlines()
    assert main(command.split()[2:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [without_figures(line) for line in shown] == [without_figures(line) for line in printed]


def without_figures(line: str) -> str:
    """Leave out what differs from processor to processor and with every better rule."""
    return re.sub(r"\d+ placements|within [\d.e+-]+|[\d.e+-]+ and [\d.e+-]+ \(", "", line)
