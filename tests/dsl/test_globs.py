"""Globs match one segment at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.dsl.globs import Glob


@pytest.mark.parametrize(
    ("glob", "yes", "no"),
    [
        ("h.*.up", ["h.0.up", "h.10.up"], ["h.0.mlp.up", "h.up", "x.h.0.up"]),
        ("h.**", ["h.0", "h.0.mlp.up"], ["h", "hh.0"]),
        ("**.up", ["up", "h.0.up"], ["h.0.upp"]),
        ("h.**.up", ["h.up", "h.0.up", "h.0.mlp.up"], ["h.0.up.x"]),
        ("h.[0..3].up", ["h.0.up", "h.3.up"], ["h.4.up", "h.x.up"]),
        ("h.[0,2,8..9]", ["h.0", "h.2", "h.9"], ["h.1", "h.10"]),
        ("{q,k}_proj", ["q_proj", "k_proj"], ["v_proj", "qk_proj"]),
        ("a.{x*,y}", ["a.x1", "a.y", "a.x"], ["a.y1"]),
        ("c_?c", ["c_fc"], ["c_ffc", "c_c"]),
        ("c_*", ["c_fc", "c_"], ["c.fc"]),
        ("0.weight", ["0.weight"], ["00weight"]),
        ("a+b", ["a+b"], ["aab"]),
    ],
)
def test_a_glob_matches_these_and_not_those(glob: str, yes: list[str], no: list[str]) -> None:
    assert [path for path in yes if not Glob(glob).matches(path)] == []
    assert [path for path in no if Glob(glob).matches(path)] == []


@given(st.lists(st.from_regex(r"[a-z_0-9]{1,4}", fullmatch=True), min_size=1, max_size=5))
def test_a_path_matches_itself_and_every_star_of_it(names: list[str]) -> None:
    path = ".".join(names)
    assert Glob(path).matches(path)
    assert Glob("**").matches(path)
    for i in range(len(names)):
        assert Glob(".".join([*names[:i], "*", *names[i + 1 :]])).matches(path)
        assert Glob(".".join([*names[:i], "**"])).matches(path)


def test_a_range_without_numbers_is_noticed() -> None:
    assert Glob("h.[5..2].x").empty_range == "[5..2]"
    assert Glob("h.[2..5].x").empty_range is None


def test_alternatives_are_each_brace_word_and_each_end_of_a_range() -> None:
    found = [(word, glob.text) for word, glob in Glob("h.[0..3].{a,b}").alternatives()]
    assert found == [
        ("a", "h.[0..3].a"),
        ("b", "h.[0..3].b"),
        ("0", "h.0.{a,b}"),
        ("3", "h.3.{a,b}"),
    ]


def test_many_stars_do_not_take_forever() -> None:
    assert not Glob("*a" * 12 + "b").matches("a" * 30)
    assert not Glob("**." * 30 + "x").matches(".".join("a" * 40))
