"""Places in text."""

import pytest

from autoshard.source import Source, Span

TEXT = "one\n  two three\r\n\nlast"


def test_a_span_knows_its_line_and_column() -> None:
    span = Span(Source("a.plan", TEXT), TEXT.index("three"), TEXT.index("three") + 5)
    assert (span.line, span.column, span.text, span.place) == (2, 7, "three", "a.plan:2:7")


@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "a\n\n", "\n\nb"])
def test_every_character_lies_on_the_line_that_holds_it(text: str) -> None:
    source = Source("x", text)
    for offset, char in enumerate(text):
        span = Span(source, offset, offset + 1)
        line = source.line_text(span.line)
        assert char == "\n" or line[span.column - 1] == char


def test_a_final_newline_opens_no_line() -> None:
    assert Source("x", "a\nb\n").line_count == 2
    assert Source("x", "a\nb").line_count == 2
    assert Source("x", "").line_count == 1


def test_a_line_span_leaves_out_indentation_and_line_end() -> None:
    assert Source("x", TEXT).line_span(2).text == "two three"
    assert Source("x", TEXT).line_span(3).text == ""


def test_showing_a_span_does_not_show_the_whole_source() -> None:
    assert repr(Span(Source("x", "a" * 5000), 0, 2)) == "Span(x:1:1, 'aa')"
