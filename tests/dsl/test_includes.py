"""Plans made of several files, and settings from the command line."""

from pathlib import Path

import pytest

from autoshard.diagnostics import PlanError
from autoshard.dsl.load import Loaded, load_file
from tests.dsl.plans import codes, only

BASE = """autoshard 1
let layers = h.*
mesh { dp = 2, tp = 2 }
zero { stage = 1, prefetch = 2 }
tensor {
  wte: vocab
  h.*.up: colwise
  h.*.down: rowwise
}
"""


@pytest.fixture
def plan(tmp_path: Path):
    """Return a function that reads a plan which may include base.plan."""
    (tmp_path / "base.plan").write_text(BASE)

    def read(body: str, **others: str) -> Loaded:
        for name, text in others.items():
            (tmp_path / f"{name}.plan").write_text(text)
        (tmp_path / "own.plan").write_text(f"autoshard 1\n{body}")
        return load_file(tmp_path / "own.plan")

    return read


def test_own_settings_win_wherever_the_include_stands(plan) -> None:
    for body in (
        'include "base.plan"\nzero { stage = 3 }\nmesh { tp = 4 }',
        'zero { stage = 3 }\nmesh { tp = 4 }\ninclude "base.plan"',
    ):
        found = plan(body).require()
        assert (found.zero.stage, found.zero.prefetch) == (3, 2)
        assert list(found.mesh.items()) == [("dp", 2), ("tp", 4)]


def test_a_rule_with_the_same_path_replaces_the_included_one_in_place(plan) -> None:
    found = plan('include "base.plan"\ntensor { h.*.up: rowwise }').require()
    assert [(rule.glob, rule.style.name) for rule in found.tensor.rules] == [
        ("wte", "vocab"),
        ("h.*.up", "rowwise"),
        ("h.*.down", "rowwise"),
    ]


def test_drop_forgets_an_included_rule(plan) -> None:
    found = plan('include "base.plan"\ntensor { drop wte, h.* { drop up } }').require()
    assert [rule.glob for rule in found.tensor.rules] == ["h.*.down"]


def test_drop_of_nothing_is_an_error(plan) -> None:
    found = only(plan('include "base.plan"\ntensor { drop wt }').errors)
    assert (found.code, found.help) == ("AS209", ("did you mean `wte`?",))
    assert codes(plan("tensor { a: colwise, drop a }").errors) == ["AS209"]


def test_included_variables_are_known(plan) -> None:
    assert plan('include "base.plan"\nzero { units = $layers }').require().zero.units == ("h.*",)


def test_a_message_about_an_included_file_names_it(plan) -> None:
    found = only(plan('include "bad.plan"', bad="autoshard 1\nzero { stag = 1 }").errors)
    assert Path(found.span.source.name).name == "bad.plan"


def test_a_file_that_is_missing_or_includes_itself_is_refused(plan) -> None:
    assert only(plan('include "gone.plan"').errors).label == "no such file or directory"
    found = only(plan('include "own.plan"').errors)
    assert (found.code, found.message) == ("AS006", "`own.plan` includes itself")
    loop = plan('include "a.plan"', a='autoshard 1\ninclude "own.plan"')
    assert codes(loop.errors) == ["AS006"]


def test_sets_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "base.plan"
    path.write_text(BASE)
    plan = load_file(path, ["mesh.tp=4", "zero.stage = 3", "pipeline.schedule=gpipe"]).require()
    assert (plan.mesh["tp"], plan.zero.stage, plan.pipeline.schedule) == (4, 3, "gpipe")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("tp=4", "AS008"),
        ("mesh.tp", "AS008"),
        ("mesh.tpp=4", "AS101"),
        ("mash.tp=4", "AS100"),
        ("zero.stage=9", "AS123"),
        ("zero.stage= } mesh { tp = 4", "AS002"),
    ],
)
def test_a_wrong_set_is_refused(tmp_path: Path, text: str, code: str) -> None:
    path = tmp_path / "base.plan"
    path.write_text(BASE)
    found = load_file(path, [text]).errors
    assert found[0].code == code


def test_a_plan_that_cannot_be_read_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such file"):
        load_file(tmp_path / "gone.plan")
    (tmp_path / "binary.plan").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="isn't UTF-8"):
        load_file(tmp_path / "binary.plan")
