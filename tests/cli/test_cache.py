"""`autoshard cache` on the command line."""

import json

import pytest

from autoshard.cache.store import Key, Store
from autoshard.cli import main


@pytest.fixture
def filled(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path))
    for name in ("Net", "Other"):
        Store(tmp_path).keep(Key(name, {"plan": "a"}), {"seconds": 2.5, "checks": []}, bytes(2000))
    return tmp_path


def test_it_lists_models_and_the_total(filled, capsys):
    assert main(["cache"]) == 0
    text = capsys.readouterr().out
    assert text.count("compiled in 2.5 s, unused for 0.0 days") == 2
    assert "2 programs" in text
    assert text.endswith(f"of at most 2 GiB in {filled}\n")


def test_it_clears(filled, capsys):
    assert main(["cache", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    assert sorted(entry["model"] for entry in entries) == ["Net", "Other"]
    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out.startswith("2 files removed")
    assert not list(filled.iterdir())
    assert main(["cache"]) == 0
    assert "0 programs" in capsys.readouterr().out


def test_it_says_that_it_is_off(monkeypatch, capsys):
    monkeypatch.setenv("AUTOSHARD_CACHE", "off")
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == "off: AUTOSHARD_CACHE says so\n"
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["program cache"] == "off (AUTOSHARD_CACHE)"
