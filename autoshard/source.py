"""Text that people wrote, and places in it: what every message points at."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Source:
    """Hold the text of one file (or of one string) under the name messages call it by."""

    name: str
    text: str

    @cached_property
    def line_starts(self) -> tuple[int, ...]:
        """Return the offset of the first character of every line."""
        return (0, *(i + 1 for i, char in enumerate(self.text) if char == "\n"))

    @property
    def line_count(self) -> int:
        """Return the number of lines; a final newline opens no further line."""
        return max(1, len(self.line_starts) - (self.text.endswith("\n")))

    def line_of(self, offset: int) -> int:
        """Return the line number (from 1) of the character at `offset`."""
        return bisect_right(self.line_starts, offset)

    def line_text(self, line: int) -> str:
        """Return one line (from 1) without its line end."""
        start = self.line_starts[line - 1]
        end = self.line_starts[line] if line < len(self.line_starts) else len(self.text)
        return self.text[start:end].rstrip("\r\n")

    def line_span(self, line: int) -> "Span":
        """Return the span of one line (from 1) without its indentation."""
        text = self.line_text(line)
        start = self.line_starts[line - 1]
        return Span(self, start + len(text) - len(text.lstrip()), start + len(text.rstrip()))


@dataclass(frozen=True)
class Span:
    """Mark the characters `start` to `end` (not included) of a source."""

    source: Source
    start: int
    end: int

    @property
    def line(self) -> int:
        """Return the line (from 1) on which the span starts."""
        return self.source.line_of(self.start)

    @property
    def column(self) -> int:
        """Return the column (from 1) at which the span starts."""
        return self.start - self.source.line_starts[self.line - 1] + 1

    @property
    def text(self) -> str:
        """Return the marked text."""
        return self.source.text[self.start : self.end]

    @property
    def place(self) -> str:
        """Return `name:line:column`, the form terminals and editors turn into a link."""
        return f"{self.source.name}:{self.line}:{self.column}"

    def __repr__(self) -> str:
        """Show the place and the text, not the whole source."""
        return f"Span({self.place}, {self.text!r})"
