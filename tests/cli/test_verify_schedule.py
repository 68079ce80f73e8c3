"""`autoshard verify --schedule` checks a schedule made elsewhere."""

from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.schedule import make_schedule
from tests.schedule.test_order import CROSSED, SENDS_FIRST


def test_a_good_schedule_is_exit_code_0(tmp_path: Path, capsys) -> None:
    file = tmp_path / "good.csv"
    file.write_text(make_schedule("zbv", num_ranks=2, num_microbatches=4).to_csv())
    assert main(["verify", "--schedule", str(file)]) == 0
    assert "no deadlock under rendezvous" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (SENDS_FIRST, "rank 0 does '2RECV_F0' only after '0SEND_F1'"),
        (CROSSED, "rank 0 does '2RECV_B0' only after '0SEND_F2'"),
    ],
)
def test_a_reported_deadlock_is_exit_code_1_with_the_circle(
    text: str, line: str, tmp_path: Path, capsys
) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text)
    assert main(["verify", "--schedule", str(file)]) == 1
    assert line in capsys.readouterr().out


def test_a_missing_file_is_one_message(capsys) -> None:
    assert main(["verify", "--schedule", "no.csv"]) == 1
    assert "can't read the schedule `no.csv`" in capsys.readouterr().err


def test_a_file_that_is_no_schedule_is_named_with_the_cell(tmp_path, capsys) -> None:
    file = tmp_path / "odd.csv"
    file.write_text("0F0,0B0\n1F0,nonsense\n")
    assert main(["verify", "--schedule", str(file)]) == 1
    assert f"`{file}`: rank 1, cell 2: 'nonsense' isn't an action" in capsys.readouterr().err
