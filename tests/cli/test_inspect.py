"""`autoshard inspect`: no option is taken and ignored."""

from pathlib import Path

import pytest

from autoshard.cli import main

PLAN = "autoshard 1\nbatch { micro_batch_size = 4 }\n"
MODEL = "autoshard.testing.models:tiny_mlp"


@pytest.mark.parametrize(
    ("options", "said", "code"),
    [
        ("--pass lower-joint --stage 7", "there are: stage0.joint", 1),
        ("--pass split-phases --phase Q", "there are: stage0.F, stage0.I, stage0.W", 1),
        ("--stage 0", "`--stage` changes nothing without `--pass`", 2),
        ("--full", "`--full` changes nothing without `--pass`", 2),
        ("--pass joint --json", "`--json` changes nothing with `--pass`", 2),
    ],
)
def test_an_option_that_shows_nothing_is_refused(
    options: str, said: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "one.plan"
    plan.write_text(PLAN)
    assert main(["inspect", str(plan), "--model", MODEL, *options.split()]) == code
    assert said in capsys.readouterr().err


def test_nothing_to_inspect_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect"]) == 2
    assert "give PLAN and --model" in capsys.readouterr().err
