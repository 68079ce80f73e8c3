"""What docs/schedules.md shows is what the commands print."""

import re
import shlex
from pathlib import Path

import pytest

from autoshard.cli import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "schedules.md"
BLOCKS = re.findall(r"```\n\$ autoshard (.*)\n((?:.*\n)*?)```", PAGE.read_text())


def test_the_page_shows_commands() -> None:
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize(("command", "shown"), BLOCKS)
def test_a_shown_command_prints_what_the_page_shows(command, shown, capsys, monkeypatch) -> None:
    monkeypatch.chdir(PAGE.parent)
    main(shlex.split(command))
    assert capsys.readouterr().out == shown
