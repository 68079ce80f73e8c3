"""Lay out a plan file: aligned, one item a line, comments and order kept, quotes and commas gone.

A block that stands on one line stays on one line where it fits. Formatting twice changes nothing,
and the result says the same as before: its tree is equal.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from autoshard.diagnostics import PlanError
from autoshard.dsl.load import in_order
from autoshard.dsl.nodes import quoted, written
from autoshard.dsl.parse import parse
from autoshard.dsl.tree import (
    Block,
    DropItem,
    Include,
    Item,
    Let,
    PlanFile,
    RuleItem,
    Scope,
    Setting,
    Statement,
    UseItem,
)
from autoshard.source import Source, Span

WIDTH = 100
INDENT = "  "


@dataclass(frozen=True)
class Line:
    """Hold one line of output; lines of a kind that follow each other are aligned."""

    depth: int
    kind: str  # setting, let, rule, other, comment, blank
    left: str = ""
    right: str = ""
    comment: str = ""

    def text(self, width: int) -> str:
        """Return the line without its comment, its left side padded to `width`."""
        joined = {
            "setting": f"{self.left:<{width}} = {self.right}",
            "let": f"{self.left:<{width}} = {self.right}",
            "rule": f"{self.left + ':':<{width + 1}} {self.right}",
        }
        return INDENT * self.depth + joined.get(self.kind, self.left) if self.left else ""


def format_text(source: Source) -> str:
    """Return the file laid out, or raise `PlanError` when it has syntax errors."""
    parsed = parse(source)
    if parsed.diagnostics:
        raise PlanError(in_order(parsed.diagnostics))
    return format_file(parsed.file)


def format_file(file: PlanFile) -> str:
    """Return a parsed file laid out."""
    layout = Layout(file)
    layout.run()
    return "\n".join(_render(layout.lines)).rstrip("\n") + "\n"


@dataclass
class Layout:
    """Walk the tree and the comments side by side, in the order of the file."""

    file: PlanFile
    lines: list[Line] = field(default_factory=list)
    next_comment: int = 0
    last_line: int = 0  # of the source: what was laid out last ended there

    def run(self) -> None:
        """Lay out the whole file."""
        self._comments_before(self.file.header.start, 0)
        self._add(Line(0, "other", f"autoshard {self.file.version}"), self.file.header)
        for statement in self.file.statements:
            self._statement(statement)
        self._comments_before(len(self.file.source.text) + 1, 0)

    def _statement(self, node: Statement) -> None:
        self._comments_before(node.span.start, 0)
        if isinstance(node, Include):
            self._add(Line(0, "other", f'include "{node.path.text}"'), node.span)
        elif isinstance(node, Let):
            name = f"let {node.name.text}"
            self._add(Line(0, "let", name, written(node.value)), node.span)
        else:
            on = f" on {node.on.text}" if node.on else ""
            self._body(f"{node.name.text}{on}", node, 0)

    def _body(self, head: str, node: Block | Scope, depth: int) -> None:
        """Lay out a block or a scope, on one line where it stood on one."""
        one_line = self._one_line(head, node, depth)
        if one_line is not None:
            self._add(Line(depth, "other", one_line), node.span)
            return
        opening = Span(node.span.source, node.span.start, self._opening(node))
        self._add(Line(depth, "other", f"{head} {{"), opening)
        inner = len(self.lines)
        for item in node.items:
            self._item(item, depth + 1)
        self._comments_before(node.span.end, depth + 1)
        while self.lines[-1].kind == "blank" and len(self.lines) > inner:
            self.lines.pop()
        closing = Span(node.span.source, node.span.end - 1, node.span.end)
        self.last_line = closing.line  # no blank line stays in front of a brace
        self._add(Line(depth, "other", "}"), closing)

    def _opening(self, node: Block | Scope) -> int:
        """Return the end of the opening brace: the first one after the head."""
        head = node.target if isinstance(node, Scope) else (node.on or node.name)
        return node.span.source.text.index("{", head.span.end) + 1

    def _one_line(self, head: str, node: Block | Scope, depth: int) -> str | None:
        """Return the node on one line, None when it doesn't belong on one."""
        text = node.span.text
        holds_comment = any(
            node.span.start < comment.start < node.span.end for comment in self.file.comments
        )
        if "\n" in text.rstrip() or holds_comment:
            return None
        inside = ", ".join(self._inline(item) for item in node.items)
        line = f"{head} {{ {inside} }}" if inside else f"{head} {{}}"
        return line if len(INDENT) * depth + len(line) <= WIDTH else None

    def _inline(self, item: Item) -> str:
        if isinstance(item, Scope):
            inside = ", ".join(self._inline(inner) for inner in item.items)
            return (
                f"{quoted(item.target.text)} {{ {inside} }}"
                if inside
                else f"{quoted(item.target.text)} {{}}"
            )
        line = _line(item, 0)
        return line.text(len(line.left))

    def _item(self, item: Item, depth: int) -> None:
        self._comments_before(item.span.start, depth)
        if isinstance(item, Scope):
            self._body(quoted(item.target.text), item, depth)
        else:
            self._add(_line(item, depth), item.span)

    def _add(self, line: Line, span: Span) -> None:
        """Add a line for what stands at `span`, with the comments inside it and behind it."""
        self._blank_before(span.line, line.depth)
        self.last_line = Span(span.source, max(span.start, span.end - 1), span.end).line
        behind = []
        while self._comment_until(span.end) or self._comment_on(self.last_line, span.end):
            behind.append(self.file.comments[self.next_comment].text.rstrip())
            self.next_comment += 1
        self.lines.append(replace(line, comment="  ".join(behind)))

    def _comment_until(self, end: int) -> bool:
        found = self.file.comments[self.next_comment : self.next_comment + 1]
        return bool(found) and found[0].start < end

    def _comment_on(self, line: int, end: int) -> bool:
        """Return whether the next comment ends this line, with nothing between."""
        found = self.file.comments[self.next_comment : self.next_comment + 1]
        if not found or found[0].line != line:
            return False
        return not self.file.source.text[end : found[0].start].strip(" \t,;")

    def _comments_before(self, position: int, depth: int) -> None:
        """Lay out the comments that stand on lines of their own before `position`."""
        while self._comment_until(position):
            comment = self.file.comments[self.next_comment]
            self.next_comment += 1
            self._blank_before(comment.line, depth)
            self.last_line = comment.line
            self.lines.append(Line(depth, "comment", comment.text.rstrip()))

    def _blank_before(self, line: int, depth: int) -> None:
        """Keep one blank line where there were any, but none at the start of a block."""
        opens = bool(self.lines) and self.lines[-1].left.endswith("{")
        if self.lines and not opens and line > self.last_line + 1:
            self.lines.append(Line(depth, "blank"))


def _line(item: Item, depth: int) -> Line:
    if isinstance(item, Setting):
        return Line(depth, "setting", item.key.text, written(item.value))
    if isinstance(item, RuleItem):
        mark = f"{item.mark} " if item.mark else ""
        style = written(replace(item.style, name=quoted(item.style.name)))
        return Line(depth, "rule", f"{mark}{quoted(item.target.text)}", style)
    if isinstance(item, UseItem):
        return Line(depth, "other", f"use {item.name.text}")
    assert isinstance(item, DropItem)
    return Line(depth, "other", f"drop {quoted(item.target.text)}")


def _render(lines: Sequence[Line]) -> list[str]:
    texts: list[str] = []
    for _, group in groupby(lines, key=lambda line: (line.kind, line.depth)):
        same = list(group)
        width = max(len(line.left) for line in same)
        texts += [line.text(width) for line in same]
    return [*_with_comments(zip(texts, (line.comment for line in lines), strict=True))]


def _with_comments(lines: Iterable[tuple[str, str]]) -> Iterable[str]:
    """Yield the lines with their comments; those of adjacent lines begin in one column."""
    for commented, group in groupby(lines, key=lambda pair: bool(pair[1])):
        same = list(group)
        width = max(len(text) for text, _ in same)
        yield from (f"{t:<{width}}  {c}" if commented else t for t, c in same)
