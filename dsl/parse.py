"""Parse plan text: one tree, and every syntax error of the file in one run.

After an error the item it stands in is blanked out, character by character so that all places stay
true, and the text is parsed again. So one slip costs one message.
"""

import re
from dataclasses import dataclass

from autoshard.diagnostics import Diagnostic
from autoshard.dsl.grammar import HEADER, Lexeme, Stop, TreeBuilder, attempt
from autoshard.dsl.syntax_errors import Trouble, describe
from autoshard.dsl.tree import PlanFile
from autoshard.source import Source, Span

VERSION = "1"
MAX_ERRORS = 20
MAX_REPAIRS = 100
_SEPARATORS = ("_NL", "COMMA", "SEMICOLON", "LBRACE", "RBRACE")


@dataclass(frozen=True)
class Parsed:
    """Hold the tree of what could be read, and what could not."""

    file: PlanFile
    diagnostics: tuple[Diagnostic, ...] = ()


def parse(source: Source) -> Parsed:
    """Parse a whole file; the tree leaves out the items that have syntax errors."""
    text, shift, found = _with_header(source)
    lines = {diagnostic.span.line for diagnostic in found if diagnostic.span}
    for _ in range(MAX_REPAIRS):
        tried = attempt(text)
        if tried.stop is None:
            break
        trouble = _trouble(tried.stop, tried.tokens, text, source, shift)
        if trouble.line not in lines and len(found) < MAX_ERRORS:
            found.append(describe(trouble))
        lines.add(trouble.line)
        text = _repair(trouble)
    else:  # hopeless text: keep the messages, forget the rest
        text, tried = HEADER, attempt(HEADER)
    file = TreeBuilder(source, shift).file(tried.tree, tried.tokens, text)
    return Parsed(file, (*found, *_version_error(file, source)))


def _with_header(source: Source) -> tuple[str, int, list[Diagnostic]]:
    """Return text that begins with the version line, put there when the user's lacks it."""
    bare = _blank_comments(source.text)
    stripped = bare.lstrip("\r\n\t ;")
    start = len(bare) - len(stripped) if stripped else 0
    if re.match(r"autoshard[ \t]+\d", stripped):
        return source.text, 0, []
    word = re.split(r"[^\w.*]", stripped, maxsplit=1)[0]
    error = Diagnostic(
        "AS003",
        "a plan starts with the language version",
        Span(source, start, start + max(len(word), 1)),
        f"expected `autoshard {VERSION}`",
        (f"put `autoshard {VERSION}` on the first line",),
    )
    text = source.text
    if word == "autoshard":  # without its number, or with a wrong one: only that line is lost
        text = _blank(text, start, _line_end(text, start))
    return HEADER + text, len(HEADER), [error]


def _blank_comments(text: str) -> str:
    """Return the text with the comments before its first word blanked, at the same length."""
    lines = text.splitlines(keepends=True)
    for i, line in enumerate(lines):
        bare = line.strip("\r\n\t ;")
        if bare and not bare.startswith("#"):
            break
        lines[i] = "".join(char if char in "\r\n" else " " for char in line)
    return "".join(lines)


def _version_error(file: PlanFile, source: Source) -> tuple[Diagnostic, ...]:
    if file.version == VERSION:
        return ()
    start = source.text.index(file.version)
    error = Diagnostic(
        "AS005",
        f"this plan is written in language version {file.version}",
        Span(source, start, start + len(file.version)),
        f"this autoshard reads version {VERSION}",
        (f"write `autoshard {VERSION}`, or use the autoshard that the plan was written for",),
    )
    return (error,)


def _trouble(
    stop: Stop, before: tuple[Lexeme, ...], text: str, source: Source, shift: int
) -> Trouble:
    """Return the place of the error with what stands before it."""
    return Trouble(text, source, shift, stop.position, stop.token, before, stop.accepts)


def _repair(trouble: Trouble) -> str:
    """Return the text with the broken item blanked, or with a missing `}` put at the end."""
    text = trouble.text
    if trouble.at_end and trouble.open_paren is None and "RBRACE" in trouble.accepts:
        return text.rstrip("\n") + "\n}\n"
    start, end = _broken_part(trouble)
    while end < len(text) and not text[start:end].strip():
        end += 1  # blank at least one character: every repair must come nearer to the end
    return _blank(text, start, end) if text[start:end].strip() else HEADER


def _broken_part(trouble: Trouble) -> tuple[int, int]:
    """Return the item around the error: from its first token to the separator after it."""
    text, paren = trouble.text, trouble.open_paren
    if paren is not None:
        before = tuple(t for t in trouble.before if t.end <= paren.start)
        return _item_start(before), _line_end(text, paren.start)
    start, end = _item_start(trouble.before), _item_end(text, trouble.position)
    if text[end : end + 1] != "{":
        return start, end
    if "LBRACE" in trouble.accepts and end > trouble.position:
        return trouble.position, end  # what stands before opens the block well
    return start, _block_end(text, end)


def _item_start(before: tuple[Lexeme, ...]) -> int:
    """Return where the item of the last token begins, never inside the version line."""
    depth = 0
    for token in reversed(before):
        depth += (token.type in ("RPAR", "RSQB")) - (token.type in ("LPAR", "LSQB"))
        if depth <= 0 and token.type in _SEPARATORS:
            return token.end
    return before[1].end if len(before) > 1 and before[0].type == "AUTOSHARD" else 0


def _item_end(text: str, position: int) -> int:
    """Return where the item ends: at a separator, or at a `{` that this line doesn't close."""
    depth = 0
    for i in range(position, _line_end(text, position)):
        if text[i] == "#" or (depth <= 0 and text[i] in ";,}"):
            return i
        depth += (text[i] in "{([") - (text[i] in "})]")
    end = _line_end(text, position)
    brace = text.rfind("{", position, end)
    return brace if depth > 0 and brace >= 0 else end


def _block_end(text: str, brace: int) -> int:
    """Return the end of the block that `brace` opens, or the end of its line when there is none."""
    depth = 0
    for i in range(brace, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return i + 1
    return _line_end(text, brace)


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _blank(text: str, start: int, end: int) -> str:
    """Return the text with a part blanked; line ends stay where they are."""
    kept = "".join(char if char in "\r\n" else " " for char in text[start:end])
    return text[:start] + kept + text[end:]
