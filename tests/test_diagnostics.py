"""Errors and the caret format."""

from autoshard import diagnostics
from autoshard.diagnostics import (
    AutoshardError,
    Diagnostic,
    InternalError,
    Label,
    PlanError,
    Remark,
    Severity,
    render,
)
from autoshard.source import Source, Span

SOURCE = Source("a.plan", "autoshard 1\nmesh { tp = 2 }\n\n\n\n\n\n\n\nzero { stage = 9 }\n")


def span(text: str) -> Span:
    start = SOURCE.text.index(text)
    return Span(SOURCE, start, start + len(text))


def test_a_message_points_with_a_caret() -> None:
    error = Diagnostic("AS123", "no", span("tp = 2"), "here", ("do that",), ("because",))
    assert render(error).splitlines() == [
        "error[AS123]: no",
        " --> a.plan:2:8",
        "  |",
        "2 | mesh { tp = 2 }",
        "  |        ^^^^^^ here",
        "  |",
        "  = help: do that",
        "  = note: because",
    ]


def test_a_second_place_is_marked_with_dashes_and_the_gutter_fits_the_larger_number() -> None:
    first = Label(span("mesh"), "first")
    error = Diagnostic("", "no", span("9"), secondary=(first,), severity=Severity.WARNING)
    assert render(error).splitlines() == [
        "warning: no",
        "  --> a.plan:10:16",
        "   |",
        " 2 | mesh { tp = 2 }",
        "   | ---- first",
        "...",
        "10 | zero { stage = 9 }",
        "   |                ^",
    ]


def test_a_second_place_in_another_file_names_that_file() -> None:
    other = Source("b.plan", "autoshard 1")
    error = Diagnostic("", "no", span("9"), secondary=(Label(Span(other, 0, 9), "there"),))
    assert "  ::: b.plan:1:1" in render(error)


def test_no_line_of_a_message_ends_in_a_space() -> None:
    error = Diagnostic("AS1", "no", span("9"))
    assert all(line == line.rstrip() for line in render(error).splitlines())


def test_a_mark_past_the_end_of_a_line_is_one_caret() -> None:
    end = SOURCE.text.index("\nmesh")
    assert render(Diagnostic("", "no", Span(SOURCE, end, end + 9))).endswith("           ^")


def test_an_error_without_a_place_still_has_its_help() -> None:
    assert render(Diagnostic("", "no", help=("do",))) == "error: no\n  = help: do"


def test_an_error_carries_several_diagnostics() -> None:
    error = PlanError([Diagnostic("AS1", "one", span("9")), Diagnostic("AS2", "two")])
    assert error.code == "AS1"
    assert error.span == span("9")
    assert "one" in str(error) and "two" in str(error)


def test_help_may_be_one_string_or_several() -> None:
    assert AutoshardError("no", help="a").diagnostics[0].help == ("a",)
    assert AutoshardError("no", help=["a", "b"]).diagnostics[0].help == ("a", "b")


def test_only_our_own_mistakes_exit_with_3() -> None:
    kinds = [
        kind
        for kind in vars(diagnostics).values()
        if isinstance(kind, type) and issubclass(kind, AutoshardError)
    ]
    codes = {kind.__name__: kind.exit_code for kind in kinds}
    assert codes.pop(InternalError.__name__) == 3
    assert set(codes.values()) == {1}


def test_a_remark_is_one_line() -> None:
    assert str(Remark("fuse", "missed", "h.0", "no norm")) == "fuse: missed: h.0: no norm"


def test_context_is_added_as_a_note_and_leaves_the_message() -> None:
    error = AutoshardError("no")
    error.add_note("while loading")
    assert str(error) == "error: no\n  = note: while loading"
