"""The package list of pyproject.toml is the folders that exist."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = {"passes": "autoshard.passes", "dsl": "autoshard.dsl"}


def package_folders() -> set[str]:
    """Return the dotted name of every folder that is a package once installed."""
    found = set()
    for top in ("autoshard", *TOP_LEVEL):
        for init in (ROOT / top).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT).parts
            found.add(".".join((TOP_LEVEL.get(parts[0], parts[0]), *parts[1:])))
    return found


def test_every_package_folder_is_listed_in_pyproject() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.10 has none
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(listed) == package_folders()
