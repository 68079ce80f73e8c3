"""The script behind `make demo` and `make test` borrows a supported torch, and only that."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("environment", ROOT / ".ci" / "environment.py")
assert spec and spec.loader
environment = importlib.util.module_from_spec(spec)
spec.loader.exec_module(environment)


def a_python_with(tmp_path: Path, version: str) -> str:
    """Return a program that answers the probe like a Python that has this torch."""
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho {version} {tmp_path}\n")
    fake.chmod(0o755)
    return str(fake)


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.14.1+cu130"])
def test_a_supported_torch_is_borrowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(sys, "executable", a_python_with(tmp_path, version))
    assert environment.find_torch() == (version, str(tmp_path))


@pytest.mark.parametrize("version", ["2.12.1", "2.15.0", "1.13.1", "3.0.0"])
def test_a_torch_outside_the_declared_range_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(sys, "executable", a_python_with(tmp_path, version))
    assert environment.find_torch() is None


def test_a_python_without_torch_lends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert environment.find_torch() is None


def test_the_borrowed_version_replaces_the_pinned_one(tmp_path: Path) -> None:
    environment.write_constraints(tmp_path / "c.txt", "2.14.0+cu130")
    lines = (tmp_path / "c.txt").read_text().splitlines()
    assert "torch==2.14.0+cu130" in lines
    assert sum(line.startswith("torch==") for line in lines) == 1
    assert "transformers==5.24.0" in lines
