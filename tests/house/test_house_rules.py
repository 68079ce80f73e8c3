"""This repository keeps its house rules."""

from pathlib import Path

import pytest

from tests.house import checks

ROOT = Path(__file__).resolve().parents[2]
SIZED = ("autoshard", "passes", "dsl", "tests", "examples", "benchmarks")


def assert_none(findings: list[str]) -> None:
    """Fail with one finding a line."""
    assert not findings, "\n" + "\n".join(findings)


def test_imports_run_down_the_layers() -> None:
    assert_none(checks.layer_findings(ROOT))


def test_no_import_hides_in_a_function() -> None:
    assert_none(checks.late_import_findings(ROOT))


def test_files_and_functions_are_short() -> None:
    assert_none(checks.size_findings(ROOT, SIZED))


def test_everything_public_has_a_docstring() -> None:
    assert_none(checks.docstring_findings(ROOT))


def test_every_function_has_a_return_annotation() -> None:
    assert_none(checks.annotation_findings(ROOT))


def test_every_pass_has_a_case_and_an_error_case() -> None:
    if not (ROOT / "tests" / "cases").is_dir():
        pytest.skip("there are no file cases yet")
    assert_none(checks.case_findings(ROOT))


def test_no_file_names_a_machine_or_a_registry() -> None:
    assert_none(checks.word_findings(ROOT))
