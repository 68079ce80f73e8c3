"""Models of other packages, where those are installed, under four layouts."""

import pytest

from autoshard.testing.coverage.cells import COLUMNS, Row, measure
from autoshard.testing.coverage.families import PACKAGE, Family
from autoshard.testing.coverage.packages import PACKAGES, is_installed

LAYOUTS = ("tp2", "pp2", "zero3 dp2", "tp2 x pp2")


@pytest.mark.parametrize("name", PACKAGES)
def test_a_model_of_another_package_is_equal(name: str) -> None:
    if not is_installed(name):
        pytest.skip(f"needs {PACKAGES[name][0]}")
    row = measure(Family(name, PACKAGE), tuple(c for c in COLUMNS if c.name in LAYOUTS))
    found = {layout: (cell.status, cell.reason) for layout, cell in row.cells.items()}
    assert found == dict.fromkeys(("capture", *LAYOUTS), ("equal", "")), row.note
    assert row.split > 0.4 or "convnext" in name  # its stream is as wide as what it splits


def test_a_model_whose_package_is_missing_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "made up", ("no_such_package", PACKAGES["timm vit"][1]))
    row: Row = measure(Family("made up", PACKAGE))
    assert (row.cells, row.note) == ({}, "`no_such_package` isn't installed")
