"""Globs over dotted paths, one segment at a time: `model.layers.[0..3].*.{q,k}_proj`.

`*` and `?` match inside a segment, `**` matches any number of segments, `{a,b}` either, `[0..5]`
and `[0,2]` whole segments that are such numbers. Everything else stands for itself.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

_BRACES = re.compile(r"\{([\w*,]+)\}")
_RANGES = re.compile(r"\[([\d.,]+)\]")
_PIECES = re.compile(r"\{[\w*,]+\}|\*+|\?|.", re.DOTALL)


@dataclass(frozen=True)
class Glob:
    """Match dotted paths against one pattern."""

    text: str

    @cached_property
    def segments(self) -> tuple[str, ...]:
        """Return the parts between the dots; the dots of `[0..5]` divide nothing."""
        return tuple(re.findall(r"\[[\d.,]+\]|[^.]+", self.text))

    def matches(self, path: str) -> bool:
        """Return whether the whole path matches."""
        return _match(self.segments, tuple(path.split(".")))

    def prefix(self, length: int) -> "Glob":
        """Return the glob of the first `length` segments."""
        return Glob(".".join(self.segments[:length]))

    @cached_property
    def empty_range(self) -> str | None:
        """Return the first `[...]` that no number is in, such as `[5..0]`."""
        return next((s for s in self.segments if _RANGES.fullmatch(s) and not _ranges(s)), None)

    def alternatives(self) -> Iterator[tuple[str, "Glob"]]:
        """Yield each `{}` alternative and each end of a range, with the glob that has only it."""
        for match in _BRACES.finditer(self.text):
            words = [word for word in match[1].split(",") if word]
            for word in words if len(words) > 1 else ():
                yield word, self._instead(match, word)
        for match in _RANGES.finditer(self.text):
            for low, high in _ranges(match[0]):
                for number in dict.fromkeys((low, high)):
                    yield str(number), self._instead(match, str(number))

    def _instead(self, match: re.Match[str], text: str) -> "Glob":
        return Glob(self.text[: match.start()] + text + self.text[match.end() :])


def _match(segments: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Return whether the segments match the names one by one.

    `**` takes any number of names; at the end of a glob at least one: `h.**` is all below `h`.
    """
    reachable = {0}  # how many names the segments so far may have taken
    for i, segment in enumerate(segments, 1):
        if segment == "**" and reachable:
            least = min(reachable) + (i == len(segments))
            reachable = set(range(least, len(names) + 1))
        else:
            reachable = {i + 1 for i in reachable if i < len(names) and _one(segment, names[i])}
    return len(names) in reachable and bool(names)


@lru_cache(maxsize=4096)
def _one(segment: str, name: str) -> bool:
    if _RANGES.fullmatch(segment):
        return name.isdecimal() and any(a <= int(name) <= b for a, b in _ranges(segment))
    return _pattern(segment).fullmatch(name) is not None


@lru_cache(maxsize=4096)
def _ranges(segment: str) -> tuple[tuple[int, int], ...]:
    """Return the ranges of `[0..3,7]` that hold any number: ((0, 3), (7, 7))."""
    found = []
    for part in segment[1:-1].split(","):
        ends = part.split("..")
        if len(ends) > 2 or not all(end.isdecimal() and len(end) < 10 for end in ends):
            continue
        if int(ends[0]) <= int(ends[-1]):
            found.append((int(ends[0]), int(ends[-1])))
    return tuple(found)


@lru_cache(maxsize=4096)
def _pattern(segment: str) -> re.Pattern[str]:
    return re.compile("".join(_regex(piece) for piece in _PIECES.findall(segment)))


def _regex(piece: str) -> str:
    if piece.startswith("{") and len(piece) > 1:
        return f"(?:{'|'.join(_regex_of(word) for word in piece[1:-1].split(','))})"
    if piece.startswith("*"):
        return ".*"
    return "." if piece == "?" else re.escape(piece)


def _regex_of(word: str) -> str:
    return re.sub(r"(?:\\\*)+", ".*", re.escape(word))
