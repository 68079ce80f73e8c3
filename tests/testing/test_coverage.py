"""The coverage page: families nobody here wrote, measured; its text; its exit code."""

from pathlib import Path

import pytest

from autoshard.diagnostics import PlanError
from autoshard.testing.coverage import __main__ as command
from autoshard.testing.coverage.cells import COLUMNS, NAMES, Cell, Row, judged, measure
from autoshard.testing.coverage.families import Family
from autoshard.testing.coverage.page import all_equal, render

pytest.importorskip("transformers")
CROSSED = tuple(column for column in COLUMNS if column.name in ("tp2", "tp2 x pp2"))


def test_a_family_is_equal_under_the_rules_that_its_graph_gives() -> None:
    row = measure(Family("vit", "image"), CROSSED)
    assert {n: c.status for n, c in row.cells.items()} == dict.fromkeys(
        ("capture", "tp2", "tp2 x pp2"), "equal"
    ), row.cells
    assert row.split > 0.8


def test_a_family_that_keeps_its_default_size_is_not_built() -> None:
    row = measure(Family("dots1", "causal"))
    assert row.note and not row.cells


PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
BANK = (
    *("gpt2", "llama", "bloom", "opt", "bert", "t5", "vit", "qwen2", "gpt_neox", "mistral"),
    *("distilbert", "mixtral", "gptj", "roberta", "phi", "starcoder2", "gpt_neo"),
)


def test_the_page_that_is_shipped_has_every_family_of_the_bank_and_nothing_wrong() -> None:
    text = PAGE.read_text(encoding="utf-8")
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if "|" in line}
    assert [name for name in BANK if name not in lines] == []
    assert not [line for line in lines.values() if "wrong" in line or "crashed" in line]
    assert sum("equal | equal" in line for line in lines.values()) >= 60


def rows(status: str) -> list[Row]:
    good = Row("llama", "causal", dict.fromkeys(NAMES, Cell("equal")), plan="hf", split=0.9)
    cells = {**good.cells, "tp2": Cell(status, "because | of")}
    return [good, Row("t5", "seq2seq", cells), Row("odd", "image", note="no sizes")]


def test_the_page_counts_and_gives_every_reason_once() -> None:
    text = render(rows("refused"))
    assert "**2 families, 1 equal in all 6 columns.**" in text
    assert "| llama | hf | 90% | equal |" in text
    assert "refused (1)" in text and "1. because \\| of" in text
    assert "- odd (image): no sizes" in text
    assert [all_equal(row) for row in rows("refused")] == [True, False, False]


@pytest.mark.parametrize(("status", "code"), [("refused", 0), ("wrong", 1), ("crashed", 1)])
def test_a_wrong_number_or_a_crash_fails_the_run(
    status: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name = {row.family: row for row in rows(status)}
    found = tuple(Family(row.family, row.kind) for row in by_name.values())
    monkeypatch.setattr(command, "families", lambda: found)
    monkeypatch.setattr(command, "measure", lambda family, columns: by_name[family.name])
    cache, page = tmp_path / "rows", tmp_path / "page.md"
    assert command.main(["--cache", str(cache), "--out", str(page)]) == code
    assert len(cache.read_text().splitlines()) == 3
    assert "2 families" in page.read_text()
    monkeypatch.setattr(command, "measure", None)  # all rows are in the cache now
    assert command.main(["--cache", str(cache), "--json"]) == code


def test_only_errors_with_a_name_are_refusals() -> None:
    assert judged(ValueError("boom")) == Cell("crashed", "ValueError: boom")
    assert judged(PlanError("broken")) == Cell("crashed", "PlanError: error: broken")
    assert judged(PlanError("no\nmore", code="AS404")) == Cell("refused", "[AS404]: no")
