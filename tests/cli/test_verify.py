"""`autoshard verify` on the command line: what it prints, and its exit codes."""

import json
from pathlib import Path

import pytest

from autoshard import verify
from autoshard.cli import main
from autoshard.schedule import make_schedule
from autoshard.testing.mutants import named

MODEL = """
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).relu())

class Odd(Tiny):
    def forward(self, x):
        return self.down(self.up(x).sigmoid().erfinv())

def loss(output, batch):
    return output.square().mean()

def tiny():
    return Tiny(), {"x": torch.ones(4, 4)}, loss

def odd():
    return Odd(), {"x": torch.ones(4, 4)}, loss
"""
PLAN = """autoshard 1
mesh { tp = 2 }
batch { micro_batch_size = 4 }
tensor { up: colwise, down: rowwise }
"""
PROVED = ["types", "erasure", "order"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with a model and two plans."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    Path("good.plan").write_text(PLAN)
    Path("wrong.plan").write_text(PLAN.replace("down:", "dwn:"))


def run(plan: str, *words: str, model: str = "tiny") -> int:
    return main(["verify", plan, "--model", f"model.py:{model}", *words])


def test_an_equal_plan_exits_with_0_even_when_strict(capsys: pytest.CaptureFixture) -> None:
    assert run("good.plan", "--strict", "--steps", "1") == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1].split(None, 1) == ["verdict", "equal to the plain model"]
    assert all(f"{link:<15} proved" in text for link in PROVED)


def test_a_wrong_plan_exits_with_1_and_its_place(capsys: pytest.CaptureFixture) -> None:
    assert run("wrong.plan") == 1
    assert "--> wrong.plan:4:23" in capsys.readouterr().err


def test_what_is_not_shown_fails_only_when_strict(capsys: pytest.CaptureFixture) -> None:
    words = ("good.plan", "--no-numbers", "--json")
    assert run(*words) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["good"], verdict["complete"]) == (True, False)
    assert [row["status"] for row in verdict["rows"] if row["link"] in PROVED] == ["proved"] * 3
    assert run(*words, "--strict") == 1


def test_an_operator_without_a_rule_is_named_as_unproven(capsys: pytest.CaptureFixture) -> None:
    assert run("good.plan", "--no-numbers", "--strict", model="odd") == 1
    out = capsys.readouterr().out
    assert "types           unproven" in out and "aten.erfinv.default" in out


def test_a_wrong_program_exits_with_3_and_leaves_the_json_whole(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = verify.compile_plan

    def broken(*args: object, **options: object):
        made = compiled(*args, **options)
        assert named("drop-collective").plant(made.program)
        return made

    monkeypatch.setattr(verify, "compile_plan", broken)
    assert run("good.plan", "--no-numbers", "--json") == 3
    printed = capsys.readouterr()
    assert json.loads(printed.out)["verdict"] == "WRONG: do not run this plan"
    assert "this is a mistake of ours" in printed.err


def test_nothing_to_verify_is_wrong_usage(capsys: pytest.CaptureFixture) -> None:
    assert main(["verify", "good.plan"]) == 2
    assert "give a PLAN and --model" in capsys.readouterr().err


def test_a_schedule_alone_is_told_as_json(capsys: pytest.CaptureFixture) -> None:
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=4)
    Path("good.csv").write_text(schedule.to_csv())
    assert main(["verify", "--schedule", "good.csv", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["good"] and found["ranks"] == 2 and len(found["deadlock"]) == 4
