"""Damaged plans: never a traceback, always an end, always a place inside the text."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cli.plan_check import check
from autoshard.diagnostics import AutoshardError, render
from autoshard.dsl.formatter import format_text
from autoshard.source import Source
from tests.dsl.plans import model

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [
    path.read_text()
    for folder in ("examples/plans", "tests/dsl/wrong")
    for path in sorted((ROOT / folder).glob("*.plan"))
]
PIECES = [
    *'{}()[]=:,;#$"*\\.-\n\t\r ',
    "autoshard 1",
    "override ",
    "use ",
    "drop x",
    'include "x.plan"\n',
    "let a = $a\n",
    "$a",
    "[0..",
    "{a,",
    "**",
    "1e999999GB",
    "9" * 5000,
    "\x00",
    "é",
    "\u2028",
    "٣",
    "mesh { dp = auto }",
    "pipeline { split = before(",
]
FACTS = model()


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """Return the text of a plan with some pieces cut out, put in, doubled or swapped."""
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(text)))
        end = draw(st.integers(at, min(len(text), at + 30)))
        piece = draw(st.sampled_from([*PIECES, "", text[at:end] * 2, text[end : end + 20]]))
        text = text[:at] + piece + text[end:]
    return text


def assert_told(text: str) -> None:
    """Check and format `text`; nothing but our own errors may come out."""
    source = Source("f.plan", text)
    for world in (None, 8):
        result = check(source, (), FACTS, world)
        for diagnostic in result.diagnostics:
            assert render(diagnostic)
            span = diagnostic.span
            assert span is None or 0 <= span.start <= len(span.source.text)
    try:
        formatted = format_text(source)
    except AutoshardError as error:
        assert str(error)
    else:
        assert format_text(Source("g.plan", formatted)) == formatted


@settings(max_examples=40, deadline=None)
@given(damaged())
def test_a_damaged_plan_is_told_not_traced(text: str) -> None:
    assert_told(text)


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=80))
def test_any_text_at_all_is_told_not_traced(text: str) -> None:
    assert_told(text)
    assert_told("autoshard 1\n" + text)
    assert_told("autoshard 1\ntensor {\n" + text)
