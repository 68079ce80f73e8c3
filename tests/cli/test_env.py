"""`autoshard env` on the command line."""

import json
import shutil

import pytest

from autoshard.cli import env, main
from autoshard.ops import native
from autoshard.ops.native import NativeLibrary


def test_it_names_versions_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert {"autoshard", "torch", "cpu kernels", "cuda kernels", "devices"} <= set(lines)


def test_json_has_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == env.facts()


@pytest.mark.parametrize(
    ("compiler", "advice"),
    [
        (None, "none of c++, g++, clang++ is on PATH: install a C++ compiler, then reinstall"),
        ("/bin/g++", "'c++' is on PATH: reinstall autoshard"),
    ],
)
def test_missing_cpu_kernels_are_told_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, compiler: str | None, advice: str
) -> None:
    monkeypatch.setattr(native, "CPU", NativeLibrary("autoshard._native", None, "not built"))
    monkeypatch.setattr(shutil, "which", lambda name: compiler)
    told = env.facts()["cpu kernels"]
    assert told.startswith("not built; torch ops run instead")
    assert advice in told


def test_a_library_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("undefined symbol: twice")

    monkeypatch.setattr(native.importlib, "import_module", broken)
    library = native._load("autoshard._native")
    assert library.reason == "built but does not load: undefined symbol: twice"
