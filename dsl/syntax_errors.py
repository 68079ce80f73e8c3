"""Say what is wrong with the syntax of a plan: the place, what may stand there, the way out."""

from dataclasses import dataclass
from functools import cached_property

from autoshard.diagnostics import Diagnostic
from autoshard.dsl.grammar import Lexeme
from autoshard.source import Source, Span

# What the grammar calls its tokens and what people call them, in the order messages list them.
NAMES = {
    "RBRACE": "`}`",
    "_NL": "a new line",
    "SEMICOLON": "`;`",
    "COMMA": "`,`",
    "COLON": "`:`",
    "EQUAL": "`=`",
    "LBRACE": "`{`",
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "WORD": "a name or module path",
    "QUANTITY": "a number",
    "VAR": "a `$variable`",
    "STRING": "a quoted string",
    "ON": "`on`",
    "$END": "the end of the file",
}
# Words that only some places accept; naming them everywhere would hide what matters.
_QUIET = {"INCLUDE", "LET", "MARK", "USE", "DROP", "ON"}
_OPENERS = {"LBRACE": "RBRACE", "LPAR": "RPAR", "LSQB": "RSQB"}
ARITHMETIC = "plans do no arithmetic: write the number, or `auto`"


@dataclass(frozen=True)
class Trouble:
    """Hold where parsing stopped: the token there (None for a stray character), what was before."""

    text: str
    source: Source
    shift: int
    position: int
    token: Lexeme | None
    before: tuple[Lexeme, ...]
    accepts: frozenset[str]

    @property
    def at_end(self) -> bool:
        """Return whether the file ended too early."""
        return self.position >= len(self.text)

    @property
    def line(self) -> int:
        """Return the line of the user's text to which the error belongs."""
        span = describe(self).span
        return span.line if span else 1

    @cached_property
    def _open(self) -> tuple[Lexeme, ...]:
        """Return the opening tokens that were never closed, outermost first."""
        stack: list[Lexeme] = []
        for token in self.before:
            if token.type in _OPENERS:
                stack.append(token)
            elif stack and token.type == _OPENERS[stack[-1].type]:
                stack.pop()
        return tuple(stack)

    @property
    def open_brace(self) -> Lexeme | None:
        """Return the innermost `{` that is still open."""
        return next((t for t in reversed(self._open) if t.type == "LBRACE"), None)

    @property
    def open_paren(self) -> Lexeme | None:
        """Return the `(` or `[` that is still open from an earlier line, None when there is none.

        Line ends inside it were dropped, so the error showed only lines later.
        """
        inner = self._open[-1] if self._open and self._open[-1].type != "LBRACE" else None
        if inner is None:
            return None
        lines = self.text.count("\n", inner.start, self.position)
        return inner if lines or self.at_end else None

    def span(self, start: int, end: int) -> Span:
        """Return a place in the user's own text."""
        return Span(self.source, max(0, start - self.shift), max(0, end - self.shift))


def describe(trouble: Trouble) -> Diagnostic:
    """Return the message for one syntax error."""
    if trouble.open_paren is not None:
        return _open_paren(trouble, trouble.open_paren)
    if trouble.at_end and trouble.open_brace is not None and "RBRACE" in trouble.accepts:
        return _open_brace(trouble, trouble.open_brace)
    if trouble.at_end or (trouble.token is not None and trouble.token.type == "_NL"):
        return _unfinished(trouble)
    if trouble.token is None:
        return _character(trouble)
    return _token(trouble, trouble.token)


def _open_paren(trouble: Trouble, paren: Lexeme) -> Diagnostic:
    closing = ")" if paren.type == "LPAR" else "]"
    return Diagnostic(
        "AS004",
        f"this `{paren.text}` is never closed",
        trouble.span(paren.start, paren.end),
        "opened here",
        (f"add `{closing}`",),
    )


def _open_brace(trouble: Trouble, brace: Lexeme) -> Diagnostic:
    return Diagnostic(
        "AS004",
        "this block is never closed",
        trouble.span(brace.start, brace.end),
        "opened here",
        (f"add `}}` before the end of the file (line {trouble.source.line_count})",),
    )


def _unfinished(trouble: Trouble) -> Diagnostic:
    last = next((t for t in reversed(trouble.before) if t.type != "_NL"), None)
    end = last.end if last is not None else 0
    return Diagnostic(
        "AS002",
        "this line is not finished",
        trouble.span(end, end + 1),
        f"expected {_expected(trouble.accepts)}",
    )


def _character(trouble: Trouble) -> Diagnostic:
    char = trouble.text[trouble.position]
    pair = trouble.text[trouble.position : trouble.position + 2]
    return Diagnostic(
        "AS001",
        f"unexpected character `{char}`",
        trouble.span(trouble.position, trouble.position + 1),
        "not part of the plan language",
        _character_help(trouble, char, pair),
    )


def _character_help(trouble: Trouble, char: str, pair: str) -> tuple[str, ...]:
    if pair == "->" or (char == ">" and trouble.text[trouble.position - 1] == "="):
        return ("use `:` between a path and its style",)
    if char == '"':
        return ("a quoted string ends on its own line",)
    if char == "'":
        return ('quotes are double: `"..."`',)
    if pair in ("//", "/*"):
        return ("comments begin with `#`",)
    if char in "+-/":
        return (ARITHMETIC,) if _after_number(trouble) else ("no setting takes a negative number",)
    if char == "$":
        return ("a variable is `$name`, used as a value",)
    if char in "{}[]":
        return ("inside a path: `{a,b}` without spaces, and `[0..5]` after a dot",)
    return ()


def _token(trouble: Trouble, token: Lexeme) -> Diagnostic:
    return Diagnostic(
        "AS002",
        f"unexpected `{token.text}`",
        trouble.span(token.start, token.end),
        _token_label(trouble, token),
        _token_help(trouble, token),
    )


def _token_label(trouble: Trouble, token: Lexeme) -> str:
    if token.type == "RBRACE" and trouble.open_brace is None:
        return "no block is open here"
    return f"expected {_expected(trouble.accepts)}"


def _token_help(trouble: Trouble, token: Lexeme) -> tuple[str, ...]:
    if token.type == "QUANTITY" and trouble.before[-1:] and trouble.before[-1].type == "COLON":
        return (f"a setting is written with `=`: `{trouble.before[-2].text} = {token.text}`",)
    if token.text.startswith(("*", "?")) and _after_number(trouble):
        return (ARITHMETIC,)
    if token.type == "RBRACE" and trouble.open_brace is None:
        return ("remove it, or open its block",)
    if token.type in ("EQUAL", "COLON") and trouble.open_brace is None:
        return ("settings and rules stand inside a block: `zero { stage = 3 }`",)
    if token.type == "LSQB" and _after_path(trouble):
        return ("a range of layers is a segment of its own: `h.[0..5]`",)
    if token.type in ("WORD", "QUANTITY", "STRING") and _after_path(trouble):
        return ("a path with spaces or odd characters needs quotes",) if "." in token.text else ()
    return ()


def _after_number(trouble: Trouble) -> bool:
    return bool(trouble.before) and trouble.before[-1].type in ("QUANTITY", "VAR")


def _after_path(trouble: Trouble) -> bool:
    return bool(trouble.before) and trouble.before[-1].type == "WORD"


def _expected(accepts: frozenset[str]) -> str:
    """Return what may stand here: `a`, `a or b`, `a, b or c`."""
    known = [name for token, name in NAMES.items() if token in accepts and token not in _QUIET]
    head, last = known[:-1], known[-1:]
    return f"{', '.join(head)} or {last[0]}" if head else "".join(last) or "something else"
