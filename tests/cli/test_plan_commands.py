"""The commands about plan files, from the command line: output, exit codes, files."""

import io
import json
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.schedule import make_schedule

GOOD = "autoshard 1\n\nmesh { dp = 2, tp = 2 }\n\nbatch { micro_batch_size = 4 }\n"
WARNS = "autoshard 1\nmesh { dp = 2 }\nzero { prefetch = 2 }\n"
WRONG = "autoshard 1\nmesh { tpp = 2 }\nzero { stage = 9 }\n"
MODEL = """
from torch import nn
class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 8)
def tiny():
    return Tiny(), None
def broken():
    return Tiny(depth=3), None
def number():
    return 3
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder with three plans and a model."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("good", GOOD), ("warns", WARNS), ("wrong", WRONG)):
        Path(f"{name}.plan").write_text(text)
    Path("model.py").write_text(MODEL)
    return tmp_path


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets standard input."""
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_good_plan_ends_with_facts_and_the_command(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "check", "good.plan", "--world", "4"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "good.plan: ok",
        "mesh dp 2 x tp 2 = 4; batch 4 x 1 x dp 2 = 8",
        "start it:  torchrun --standalone --nproc-per-node 4 train.py",
    ]


SCHEDULED = """autoshard 1
mesh { pp = PP }
batch { micro_batch_size = 1, num_microbatches = 4 }
pipeline { schedule = csv("mine.csv"), split = even(h.*) }
"""


@pytest.mark.parametrize(
    ("ranks", "pp", "said"),
    [
        (0, "2", "can't read the schedule `mine.csv`: No such file or directory"),
        (3, "2", "`mine.csv` is for 3 ranks and 4 microbatches, the plan has pp = 2 and 4"),
        (3, "auto", ""),
        (3, "3", ""),
    ],
)
def test_a_schedule_file_is_looked_for_where_the_plan_names_it(
    ranks: int, pp: str, said: str, capsys: pytest.CaptureFixture
) -> None:
    Path("csv.plan").write_text(SCHEDULED.replace("PP", pp))
    if ranks:
        schedule = make_schedule("1f1b", num_ranks=ranks, num_microbatches=4)
        Path("mine.csv").write_text(schedule.to_csv())
    assert main(["plan", "check", "csv.plan"]) == bool(said)
    out = capsys.readouterr().out
    assert ("then beside the plan" in out) == (ranks == 0)
    assert said in out and ("csv.plan:4:23" in out) == bool(said)


def test_a_wrong_plan_exits_with_1_and_counts(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "check", "wrong.plan"]) == 1
    out = capsys.readouterr().out
    assert "did you mean `tp`?" in out
    assert out.endswith("wrong.plan: 2 error(s), 0 warning(s)\n")


def test_warnings_fail_only_when_strict(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "check", "warns.plan"]) == 0
    assert "warns.plan: ok, 1 warning(s)" in capsys.readouterr().out
    assert main(["plan", "check", "warns.plan", "--strict"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("error[AS") and out.endswith("warns.plan: 1 error(s), 0 warning(s)\n")
    assert main(["plan", "check", "warns.plan", "--strict", "--format", "github"]) == 1
    assert capsys.readouterr().out.startswith("::error file=warns.plan,line=3")


ODD = """
import torch
from torch import nn
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
    def forward(self, x):
        return self.down(self.up(x).sigmoid().erfinv())
def odd():
    return Odd(), {"x": torch.ones(4, 4)}, lambda output, batch: output.square().mean()
class Even(Odd):
    def forward(self, x):
        return self.down(self.up(x).relu())
def even():
    return Even(), {"x": torch.ones(4, 4)}, lambda output, batch: output.square().mean()
"""
SPLIT = "mesh { tp = 2 }\nbatch { micro_batch_size = 4 }\ntensor { up: colwise, down: rowwise }\n"


@pytest.mark.parametrize("command", [("plan", "check"), ("inspect",)], ids=" ".join)
def test_an_operator_without_a_rule_is_an_error_only_when_strict(
    command: tuple[str, ...], capsys: pytest.CaptureFixture
) -> None:
    Path("odd.py").write_text(ODD)
    Path("split.plan").write_text(f"autoshard 1\n{SPLIT}")
    words = [*command, "split.plan", "--model", "odd.py:odd"]
    assert main(words) == 0
    assert main([*words, "--strict"]) == 1
    printed = capsys.readouterr()
    said = printed.out + printed.err
    assert "error[AS408]: no placement rule for 'aten.erfinv.default' at " in said
    assert "self.up(x).sigmoid().erfinv()" in said
    assert main([*command, "split.plan", "--model", "odd.py:even", "--strict"]) == 0


def test_strict_needs_a_batch_to_trace_the_model(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "check", "good.plan", "--model", "model.py:tiny", "--strict"]) == 1
    assert "it needs a batch" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_warnings_are_shown_beside_the_output_and_are_errors_when_strict(
    command: str, capsys: pytest.CaptureFixture
) -> None:
    Path("odd.py").write_text(ODD)
    Path("warns.plan").write_text(
        WARNS.replace("dp = 2 }", "dp = 2 }\nbatch { micro_batch_size = 2 }")
    )
    words = [command, "warns.plan", "--model", "odd.py:even"]
    words += ["--no-numbers"] if command == "verify" else []
    assert main(words) == 0
    assert "warning[AS" in capsys.readouterr().err
    assert main([*words, "--strict"]) == 1
    assert "error[AS" in capsys.readouterr().err


def test_several_files_are_checked_in_one_run() -> None:
    assert main(["plan", "check", "good.plan", "warns.plan"]) == 0
    assert main(["plan", "check", "good.plan", "wrong.plan"]) == 1


def test_sets_change_a_plan_for_one_run(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "check", "good.plan", "--set", "mesh.dp=8", "--world", "16"]) == 0
    assert "dp 8 x tp 2 = 16" in capsys.readouterr().out
    assert main(["plan", "check", "good.plan", "--set", "mesh.dpp=8"]) == 1
    assert "--set mesh.dpp=8:1" in capsys.readouterr().out


def test_json_holds_places_and_numbers(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "check", "wrong.plan", "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["errors"] == 2
    first = found["diagnostics"][0]
    assert (first["code"], first["line"], first["column"], first["length"]) == ("AS101", 2, 8, 3)
    assert main(["plan", "check", "good.plan", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["global_batch_size"] == 8


def test_github_annotations_escape_line_ends(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "check", "wrong.plan", "--format", "github"]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("::error file=wrong.plan,line=2,col=8,title=AS101::unknown setting")
    assert "%0Adid you mean" in first


def test_standard_input_is_a_plan_too(stdin, capsys: pytest.CaptureFixture) -> None:
    stdin(GOOD)
    assert main(["plan", "check", "-"]) == 0
    stdin("autoshard 1\nmesh{tp=2}")
    capsys.readouterr()
    assert main(["plan", "fmt", "-"]) == 0
    assert capsys.readouterr().out == "autoshard 1\nmesh { tp = 2 }\n"


def test_what_cannot_run_yet_is_named_with_its_line(capsys: pytest.CaptureFixture) -> None:
    Path("later.plan").write_text("autoshard 1\nmesh { ep = 2 }\n")
    assert main(["plan", "check", "later.plan"]) == 0
    line = "planned, not executable yet: mesh.ep = 2 (line 2)"
    assert line in capsys.readouterr().out


def test_fmt_rewrites_and_check_only_tells(capsys: pytest.CaptureFixture) -> None:
    Path("odd.plan").write_text("autoshard 1\nmesh {tp=2}\n")
    assert main(["plan", "fmt", "odd.plan", "good.plan", "--check"]) == 1
    assert capsys.readouterr().out == "would reformat odd.plan\n"
    assert main(["plan", "fmt", "odd.plan", "good.plan"]) == 0
    assert capsys.readouterr().out == "reformatted odd.plan\n"
    assert Path("odd.plan").read_text() == "autoshard 1\nmesh { tp = 2 }\n"
    assert main(["plan", "fmt", "odd.plan", "good.plan", "--check"]) == 0


def test_fmt_leaves_a_broken_file_alone(capsys: pytest.CaptureFixture) -> None:
    Path("odd.plan").write_text("autoshard 1\nmesh {tp=\n")
    assert main(["plan", "fmt", "odd.plan"]) == 1
    assert "AS002" in capsys.readouterr().err
    assert Path("odd.plan").read_text() == "autoshard 1\nmesh {tp=\n"


def test_check_against_a_model_counts_its_modules(capsys: pytest.CaptureFixture) -> None:
    Path("tp.plan").write_text(GOOD + "tensor { up: colwise, down: rowwise }\n")
    assert main(["plan", "check", "tp.plan", "--model", "model.py:tiny"]) == 0
    assert "Tiny 616; " in (out := capsys.readouterr().out)
    assert "2 modules under tensor rules" in out
    Path("tp.plan").write_text(GOOD + "tensor { upp: colwise }\n")
    assert main(["plan", "check", "tp.plan", "--model", "model.py:tiny"]) == 1
    assert "did you mean `up`? (1 match)" in capsys.readouterr().out


def test_show_lists_matches_and_what_no_rule_touches(capsys: pytest.CaptureFixture) -> None:
    Path("tp.plan").write_text(GOOD + "tensor { up: colwise }\n")
    assert main(["plan", "show", "tp.plan", "--model", "model.py:tiny"]) == 0
    out = capsys.readouterr().out
    assert "  line   6  up: colwise  (1 matched)\n    up  Linear [32, 8]\n" in out
    assert "no tensor rule touches 2 layers with weights\n  norm  LayerNorm [32]" in out
    assert main(["plan", "show", "tp.plan", "down", "--model", "model.py:tiny"]) == 0
    out = capsys.readouterr().out
    assert "up: colwise" not in out
    assert "touches 1 layer with weights\n  down" in out


def test_init_drafts_a_plan_that_checks(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "init", "--model", "model.py:tiny", "--world", "2"]) == 0
    Path("draft.plan").write_text(capsys.readouterr().out)
    assert main(["plan", "check", "draft.plan", "--model", "model.py:tiny", "--world", "2"]) == 0
    assert main(["plan", "fmt", "draft.plan", "--check"]) == 0
    assert main(["plan", "init", "--model", "model.py:tiny", "--from", "hf"]) == 1
    assert "AS205" in capsys.readouterr().err


def test_init_follows_what_the_model_computes_where_there_is_a_batch(
    capsys: pytest.CaptureFixture,
) -> None:
    arguments = ["--model", "autoshard.testing.models:tiny_gpt", "--world", "16"]
    assert main(["plan", "init", *arguments]) == 0
    text = capsys.readouterr().out
    said = " ".join(text.split())
    assert "mesh { dp = 2, tp = 8 }" in text
    assert "micro_batch_size = 4" in text
    assert "h.*.attn.qkv: colwise(parts=3)" in said
    assert "# attention: whole heads on each rank" in text
    Path("draft.plan").write_text(text)
    assert main(["plan", "check", "draft.plan", *arguments]) == 0


def test_doc_prints_one_block_or_all(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "doc", "zero"]) == 0
    assert capsys.readouterr().out.startswith("## zero\n")
    assert main(["plan", "doc", "fsdp"]) == 1
    assert "did you mean `zero`?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("model.py", ["names no function", "file.py:function"]),
        ("gone.py:tiny", ["can't find the file `gone.py`"]),
        ("model.py:tinny", ["has no function `tinny`", "tiny"]),
        ("model.py:broken", ["TypeError", "depth", "model.py:10"]),
        ("model.py:number", ["returned (int)", "(model, batch)"]),
        ("no_such_module_x:f", ["importing `no_such_module_x` failed"]),
    ],
)
def test_a_wrong_model_is_told_in_one_message(
    spec: str, words: list[str], capsys: pytest.CaptureFixture
) -> None:
    assert main(["plan", "check", "good.plan", "--model", spec]) == 1
    err = capsys.readouterr().err
    assert [word for word in words if word not in err] == []
    assert "Traceback" not in err


def test_an_unreadable_file_is_one_line_and_debug_shows_where(
    capsys: pytest.CaptureFixture,
) -> None:
    assert main(["plan", "check", "gone.plan"]) == 1
    err = capsys.readouterr().err
    assert err == "error[AS007]: can't read the plan `gone.plan`: no such file or directory\n"
    assert main(["plan", "check", "gone.plan", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [[], ["plan"], ["plan", "chek", "x"], ["nothing"], ["plan", "check", "x", "--world", "0"]],
)
def test_wrong_usage_exits_with_2(words: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(words) == 2
    assert "usage:" in capsys.readouterr().err


def test_our_own_mistakes_exit_with_3_and_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("autoshard.cli.plan_check.load", fail)
    assert main(["plan", "check", "good.plan"]) == 3
    err = capsys.readouterr().err
    assert "internal error: ZeroDivisionError: planted" in err
    assert "Traceback" not in err
