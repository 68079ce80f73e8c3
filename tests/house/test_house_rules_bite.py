"""Each house rule finds the fault it is there for, planted in a small tree."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house import checks

Plant = Callable[[str, str], None]


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """Return a function that writes one file of a broken tree."""
    for package in checks.PACKAGES:
        (tmp_path / package).mkdir()

    def write(name: str, text: str) -> None:
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    return write


@pytest.mark.parametrize(
    ("name", "line", "fault"),
    [
        ("autoshard/ir/a.py", "import autoshard.compiler.b", "`ir` (layer 3) imports `compiler`"),
        ("autoshard/ir/a.py", "from autoshard import cost", "`ir` (layer 3) imports `cost`"),
        ("autoshard/ir/a.py", "from autoshard import Plan", "imports `autoshard` (layer 7)"),
        ("autoshard/runtime/a.py", "from autoshard.compiler import b", "never imports `compiler`"),
        ("autoshard/runtime/a.py", "import autoshard.dsl.parse", "`runtime` never imports `dsl`"),
        ("passes/a.py", "from autoshard.runtime import link", "`passes` never imports `runtime`"),
        ("passes/a.py", "from autoshard.passes.b import B", "a pass never imports another pass"),
        ("passes/a.py", "from autoshard.passes import b", "a pass never imports another pass"),
        ("passes/a.py", "from passes.b import B", "write `autoshard.passes`"),
        ("passes/a.py", "from .b import B", "relative import"),
        ("dsl/a.py", "from autoshard.ops import b", "`dsl` never imports `ops`"),
        ("dsl/a.py", "def f():\n    import torch", "`dsl` is free of torch"),
        ("autoshard/plan.py", "from torch import nn", "`plan` is free of torch"),
        ("autoshard/units.py", "import lark", "standard library only"),
        ("autoshard/attic/a.py", "x = 1", "no place in the layer table"),
    ],
)
def test_an_import_against_the_layers_is_found(
    tmp_path: Path, plant: Plant, name: str, line: str, fault: str
) -> None:
    plant(name, line + "\n")
    (finding,) = checks.layer_findings(tmp_path)
    assert finding.startswith(name)
    assert fault in finding


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("autoshard/ir/a.py", "from autoshard.ops import collectives"),
        ("autoshard/runtime/a.py", "from autoshard.ir.program import Program"),
        ("autoshard/cli/a.py", "def f():\n    from autoshard.compiler import b"),
        ("autoshard/__init__.py", "from autoshard import runtime, passes"),
        ("autoshard/diagnostics.py", "from autoshard.source import Span"),
        ("passes/pipelines.py", "from autoshard.passes.b import B"),
        ("dsl/a.py", "from lark import Lark"),
    ],
)
def test_an_import_down_the_layers_is_not_found(
    tmp_path: Path, plant: Plant, name: str, line: str
) -> None:
    plant(name, line + "\n")
    assert checks.layer_findings(tmp_path) == []


def test_an_import_in_a_function_is_found_except_in_cli(tmp_path: Path, plant: Plant) -> None:
    plant("autoshard/ir/a.py", "def f() -> None:\n    import math\n")
    plant("autoshard/cli/a.py", "def f() -> None:\n    import torch\n")
    assert checks.late_import_findings(tmp_path) == [
        "autoshard/ir/a.py:2: import of `math` in a function"
    ]


def test_a_long_file_and_a_long_function_are_found(tmp_path: Path, plant: Plant) -> None:
    plant("passes/a.py", "x = 1\n" * (checks.MAX_FILE_LINES + 1))
    plant("dsl/a.py", "def f():\n" + "    x = 1\n" * checks.MAX_FUNCTION_LINES)
    plant("dsl/b.py", "def f():\n" + "    x = 1\n" * (checks.MAX_FUNCTION_LINES - 1))
    assert checks.size_findings(tmp_path, checks.PACKAGES) == [
        "passes/a.py: 401 lines, limit 400",
        "dsl/a.py:1: `f` has 81 lines, limit 80",
    ]


def test_a_public_name_without_docstring_is_found(tmp_path: Path, plant: Plant) -> None:
    plant("passes/a.py", '"""A."""\nclass A:\n    """A."""\n    def run(self): ...\n')
    plant("passes/b.py", '"""B."""\ndef _f(): ...\nclass _B:\n    def run(self): ...\n')
    plant("passes/c.py", "x = 1\n")
    assert checks.docstring_findings(tmp_path) == [
        "passes/a.py:4: `run` without a docstring",
        "passes/c.py:1: module without a docstring",
    ]


def test_a_missing_return_annotation_is_found(tmp_path: Path, plant: Plant) -> None:
    plant("dsl/a.py", "def f() -> int:\n    def g(x): ...\n    return 1\n")
    assert checks.annotation_findings(tmp_path) == ["dsl/a.py:2: `g` without a return annotation"]


def test_a_pass_without_cases_is_found(tmp_path: Path, plant: Plant) -> None:
    plant("passes/__init__.py", "")
    plant("passes/cut_stages.py", "")
    plant("passes/canonicalize.py", "")
    plant("tests/cases/one.case", "passes: canonicalize,cut-stages{split=even}\n")
    plant("tests/cases/errors/one.case", "passes: canonicalize\n# not cut-stages-twice\n")
    assert checks.case_findings(tmp_path) == [
        "passes/cut_stages.py: no error case names `cut-stages`"
    ]


@pytest.mark.parametrize(
    "line",
    ["see /ho" + "me/me/x.py", "fixes issue" + " 7", "from py" + "pi.org", "a work" + "tree"],
)
def test_a_foreign_word_is_found(tmp_path: Path, plant: Plant, line: str) -> None:
    plant("docs/a.md", f"fine: a/b/c, issue a send\n{line}\n")
    (finding,) = checks.word_findings(tmp_path)
    assert finding.startswith("docs/a.md:2")
