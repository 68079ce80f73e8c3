"""Run every file of tests/cases; `pytest --update-golden` rewrites what they expect."""

from pathlib import Path

import pytest

from autoshard.testing.cases import read_case, run_case

FILES = sorted(Path(__file__).with_name("cases").rglob("*.case"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_case_file_gives_what_it_expects(path: Path, update_golden: bool) -> None:
    case = read_case(path)
    produced = run_case(case)
    if update_golden:
        path.write_text(str(produced))
    assert str(produced) == path.read_text()
    assert ("error" in produced.sections) == (path.parent.name == "errors")
