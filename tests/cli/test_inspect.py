"""`autoshard inspect`: no option is taken and ignored."""

from pathlib import Path

import pytest

from autoshard.cli import main

PLAN = "autoshard 1\nbatch { micro_batch_size = 4 }\n"
MODEL = "autoshard.testing.models:tiny_mlp"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--pass lower-joint --stage 7", "there are: stage0.joint"),
        ("--pass split-phases --phase Q", "there are: stage0.F, stage0.I, stage0.W"),
        ("--stage 0", "`--stage` changes nothing without `--pass`"),
        ("--full", "`--full` changes nothing without `--pass`"),
        ("--pass joint --json", "`--json` changes nothing with `--pass`"),
    ],
)
def test_an_option_that_shows_nothing_is_refused(
    options: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "one.plan"
    plan.write_text(PLAN)
    assert main(["inspect", str(plan), "--model", MODEL, *options.split()]) == 1
    assert said in capsys.readouterr().err
