"""`autoshard simulate` on the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.schedule import SCHEDULES

SMALL = ["--stages", "4", "--microbatches", "8"]


def test_the_text_names_both_bubbles(capsys) -> None:
    assert main(["simulate", "--schedule", "1f1b", *SMALL]) == 0
    text = capsys.readouterr().out
    assert "step bubble   27.3%" in text and "span bubble   27.3%" in text
    assert "most per rank: 4 3 2 1" in text
    assert "rank 0  0123......aa4bb5cc6dd7ee.ff.gg.hh" in text


@pytest.mark.parametrize("name", SCHEDULES)
def test_json_has_the_bubbles_and_the_peaks(name, capsys) -> None:
    assert main(["simulate", "--schedule", name, *SMALL, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert 0 <= facts["span_bubble"] <= facts["step_bubble"] < 1
    assert len(facts["peak_activations"]) == facts["ranks"] == 4


def test_all_schedules_are_compared_on_one_model(capsys) -> None:
    assert main(["simulate", "--schedule", "all", "--stages", "8", "--microbatches", "32"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:9]}
    assert list(rows) == list(SCHEDULES)
    assert rows["1f1b"] == ["1", "17.9%", "17.9%", "8"]
    assert rows["zbv"] == ["2", "3.5%", "0.0%", "8"]
    assert main(["simulate", "--schedule", "all", *SMALL, "--cost", "2,2,2", "--json"]) == 0
    facts = {one["schedule"]: one for one in json.loads(capsys.readouterr().out)}
    assert facts["zbv"]["cost"]["F"] == 1.0 and facts["1f1b"]["cost"]["F"] == 2.0


def test_a_csv_that_was_written_simulates_to_the_same_grid(tmp_path: Path, capsys) -> None:
    file = tmp_path / "mine.csv"
    main(["simulate", "--schedule", "1f1b", *SMALL, "--csv", str(file)])
    made = capsys.readouterr().out
    assert main(["simulate", "--schedule", str(file)]) == 0
    assert capsys.readouterr().out == made.replace("1f1b:", "mine:")


def test_a_trace_is_written(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    main(["simulate", "--schedule", "gpipe", *SMALL, "--trace", str(file)])
    assert json.loads(file.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--schedule", "2f1b"], "no schedule '2f1b'"),
        (["--schedule", "1f1b"], "1f1b needs its numbers"),
        (["--schedule", "all"], "all needs its numbers"),
        (["--schedule", "all", *SMALL, "--csv", "x"], "--csv needs one schedule, not 'all'"),
        (["--schedule", "1f1b", *SMALL, "--virtual", "2"], "virtual_stages 1; got 2"),
        (["--schedule", "1f1b", *SMALL, "--cost", "1,2"], "got 2 numbers in '1,2'"),
        (["--schedule", "1f1b", *SMALL, "--kept", "2"], "kept is a share from 0 to 1; got 2"),
        (["--schedule", "1f1b", *SMALL, "--in-flight", "3"], "holds 4 micro-batches in flight"),
        (["--schedule", "no.csv"], "can't read the schedule `no.csv`"),
        (["--schedule", "no.csv", "--stages", "2"], "--stages can't change a schedule"),
        (["--schedule", "1f1b", *SMALL, "--trace", "/no/where"], "can't write '/no/where'"),
    ],
)
def test_a_wrong_call_is_one_message_and_exit_code_1(words, message, capsys) -> None:
    assert main(["simulate", *words]) == 1
    assert message in capsys.readouterr().err


def test_simulation_never_imports_torch() -> None:
    code = (
        "import sys; from autoshard.cli import main\n"
        "main(['simulate', '--schedule', '1f1b', '--stages', '2', '--microbatches', '2'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
