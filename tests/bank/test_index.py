"""The README of the bank names files that are there, and every file of the bank."""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def test_the_index_is_complete_and_true() -> None:
    named = set(re.findall(r"`((?:tests|docs)/[\w/.]+)`", (HERE / "README.md").read_text()))
    assert [path for path in named if not (ROOT / path).is_file()] == []
    own = {f"tests/bank/{path.name}" for path in HERE.glob("test_*.py")}
    assert own - named == {"tests/bank/test_index.py"}
