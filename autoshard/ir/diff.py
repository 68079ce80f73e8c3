"""What a pass changed, block by block: identical changes of identical blocks are shown once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher

BLOCK = re.compile(r"^(.*?\.\d+)(?=\.|$)")
NAME = re.compile(
    r"[A-Za-z_][\w.]*'?(?:\[\d+\])?(?![\w(=\[])"
)  # an operand: not an operator or option
WORDS = ("True", "False", "None", "param", "buffer")
CONTEXT = 1  # unchanged lines shown on each side of a change


@dataclass(frozen=True)
class BlockDiff:
    """The lines of one block (module path) with "+", "-" or " " before each."""

    block: str
    lines: tuple[str, ...]
    same_in: tuple[str, ...] = ()  # further blocks with the same change


def block_of(path: str) -> str:
    """Return the repeated block a module path lies in ("h.3" of "h.3.attn.q"), or its root."""
    match = BLOCK.match(path)
    return match.group(1) if match else path.split(".", 1)[0]


def diff_blocks(
    before: Iterable[tuple[str, str]], after: Iterable[tuple[str, str]]
) -> tuple[BlockDiff, ...]:
    """Return the changed blocks of two prints, given as (module path, line) pairs.

    Blocks whose change is the same but for their number, and for what they read from outside,
    are folded into the first one.
    """
    old, new = _by_block(before), _by_block(after)
    folded: dict[tuple[str, ...], list[BlockDiff]] = {}
    for block in dict.fromkeys((*old, *new)):
        lines = _diff(old.get(block, ()), new.get(block, ()))
        if lines:
            key = tuple(_anonymous(line, block) for line in lines)
            folded.setdefault(key, []).append(BlockDiff(block, lines))
    return tuple(
        BlockDiff(first.block, first.lines, tuple(d.block for d in rest))
        for first, *rest in folded.values()
    )


def render(diffs: Iterable[BlockDiff]) -> str:
    """Return the diffs as text."""
    return "\n".join(_render_one(diff) for diff in diffs) or "no change"


def _anonymous(line: str, block: str) -> str:
    """Return a line with the block's own names relative to it and all other names left out."""
    code = line.split("  # ", 1)[0]

    def rename(match: re.Match[str]) -> str:
        name = match.group()
        if name.startswith(f"{block}."):
            return f"*{name[len(block) :]}"
        return name if name in WORDS else "_"

    return NAME.sub(rename, code)


def _render_one(diff: BlockDiff) -> str:
    same = ""
    if diff.same_in:
        last = diff.same_in[-1]
        names = last if len(diff.same_in) == 1 else f"{diff.same_in[0]} .. {last}"
        same = f"   (the same change in {names})"
    return "\n".join([f"{diff.block or 'model'}{same}", *(f"  {line}" for line in diff.lines)])


def _by_block(lines: Iterable[tuple[str, str]]) -> Mapping[str, list[str]]:
    blocks: dict[str, list[str]] = {}
    for path, line in lines:
        blocks.setdefault(block_of(path), []).append(line)
    return blocks


def _diff(old: Iterable[str], new: Iterable[str]) -> tuple[str, ...]:
    old, new = list(old), list(new)
    found: list[str] = []
    for group in SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(CONTEXT):
        if found:
            found.append("  ...")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                found += [f"  {line}" for line in old[i1:i2]]
                continue
            found += _side_by_side(old[i1:i2], new[j1:j2])
    return tuple(found)


def _side_by_side(old: list[str], new: list[str]) -> list[str]:
    """Return removed and added lines so that both lines of one value stand together."""
    places = {_value(line): index for index, line in enumerate(old)}
    found, shown = [], 0
    for line in new:
        place = places.get(_value(line), -1)
        if place >= shown:
            found += [f"- {gone}" for gone in old[shown : place + 1]]
            shown = place + 1
        found.append(f"+ {line}")
    return found + [f"- {gone}" for gone in old[shown:]]


def _value(line: str) -> str:
    """Return the name of the value that a line defines."""
    return line.split(":", 1)[0]
