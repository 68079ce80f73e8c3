"""Shorten a print: equal blocks once with their number, plain compute counted."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from autoshard.ir.diff import block_of

_BLOCK = re.compile(r"(?:^|\.)\d+$")
# A dropout site is a block's own number, as its name is.
_OWN_NUMBER = re.compile(r"\bsite=\d+")


@dataclass(frozen=True)
class Line:
    """One printed line: the module path it belongs to and the values it names."""

    path: str
    text: str
    reads: tuple[str, ...] = ()
    name: str = ""
    is_plain: bool = False  # compute that a skeleton leaves out


def skeleton(lines: Iterable[Line]) -> list[Line]:
    """Return the lines with each run of plain compute in one module replaced by its count."""
    found: list[Line] = []
    for (plain, path), group in groupby(lines, key=lambda line: (line.is_plain, line.path)):
        run = list(group)
        if plain and len(run) > 1:
            reads = tuple(dict.fromkeys(name for line in run for name in line.reads))
            run = [Line(path, f"{path or 'model'}: ... {len(run)} aten ops", reads, is_plain=True)]
        found += run
    return found


def fold_blocks(lines: Iterable[Line]) -> list[str]:
    """Return the text; a run of lines equal to an earlier block's is left out and counted there.

    Equal means: the same but for the block's own name and for which values it reads from outside,
    told by a hash of the structure.
    """
    runs = [(block, list(run)) for block, run in groupby(lines, lambda line: block_of(line.path))]
    keys = [_digest(block, run) if _BLOCK.search(block) else "" for block, run in runs]
    blocks: dict[str, list[str]] = {}
    for key, (block, _) in zip(keys, runs, strict=True):
        blocks.setdefault(key, []).append(block)
    printed: list[str] = []
    for key, (_, run) in zip(keys, runs, strict=True):
        names = blocks.pop(key, None) if key else []
        if names is None:
            continue
        text = [line.text for line in run]
        if len(names) > 1:
            text = [f"{len(names)} x {_listed(names)}", *(f"  {line}" for line in text)]
        printed += text
    return printed


def _digest(block: str, run: Iterable[Line]) -> str:
    """Return a hash of a block's lines without its own name and those it reads from outside."""
    digest = hashlib.sha256(block.rpartition(".")[0].encode())
    outside: dict[str, str] = {}
    for line in run:
        text = _OWN_NUMBER.sub("site=*", line.text)
        for name in sorted(set(line.reads), key=len, reverse=True):
            if not name.startswith(f"{block}."):
                mark = outside.setdefault(name, f"<{len(outside)}>")
                text = re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w.'(=])", mark, text)
        digest.update(text.replace(f"{block}.", "*.").encode())
    return digest.hexdigest()


def _listed(blocks: list[str]) -> str:
    return f"{blocks[0]} .. {blocks[-1]}" if len(blocks) > 2 else ", ".join(blocks)
