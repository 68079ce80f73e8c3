"""Where a rank's programs come from: the cache on disk, the compiler, or rank 0 that asked both.

    one process                 several ranks with one key
    cache, else compile          rank 0: cache, else compile; the others receive the saved form

Ranks whose keys differ compile each for itself, and what they compiled is compared as ever.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autoshard.cache.store import Key, Store, default_folder
from autoshard.ir.program import Program
from autoshard.ir.save import from_bytes, to_bytes
from autoshard.ir.save_values import SaveError
from autoshard.runtime.control import Control


@dataclass(frozen=True)
class Made:
    """A program, what was checked of it, and how these checks went, as lines of the report."""

    program: Program
    checks: frozenset[str] = frozenset()  # "compared", "proved"
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Had:
    """A program that this process has, with its saved form, None where it has none."""

    made: Made
    raw: bytes | None = None


def open_store(cache: bool | str | Path) -> Store | None:
    """Return the store that an option asks for: True the usual one, False none, or a folder's.

    A run that dumps its passes needs them to run: it gets none.
    """
    folder = default_folder() if cache is True else Path(cache) if cache else None
    return None if folder is None or "AUTOSHARD_DUMP" in os.environ else Store(folder)


def obtain(
    control: Control,
    store: Store | None,
    key: Key | str,
    compile: Callable[[], Made],
    needs: frozenset[str] = frozenset(),
) -> Made:
    """Return the program of ``key`` and where it came from; all ranks call this together.

    An entry of the cache of which not all of ``needs`` was checked is not used. A ``key`` of text
    says why there is none: each rank then compiles, as where ranks have different keys. What fails
    on one rank stops all of them.
    """
    if control.size == 1:
        return _find_or_make(store, key, compile, needs).made
    agreed = control.gather(_numbers(key))
    if isinstance(key, str) or any(row != agreed[0] for row in agreed):
        alone = f"not used ({key if isinstance(key, str) else 'ranks have different keys'})"
        return control.together(lambda: _make(None, key, compile, alone).made)
    had: list[_Had] = []

    def first() -> bytes:
        had.append(_find_or_make(store, key, compile, needs, is_sent=True))
        lines, raw = had[0].made.lines, had[0].raw
        head = {"lines": lines, "is_there": raw is not None}
        return json.dumps(head).encode() + b"\n" + (raw or b"")

    def here() -> Made:
        if had:
            return had[0].made
        if not head["is_there"]:
            return _make(None, key, compile, "not used (rank 0's has no saved form)").made
        sent = "program    from rank 0, which found or compiled it for all"
        return Made(from_bytes(raw), lines=(*head["lines"], sent))

    line, _, raw = control.from_first(first).partition(b"\n")
    head = json.loads(line)
    return control.together(here)


def _find_or_make(
    store: Store | None,
    key: Key | str,
    compile: Callable[[], Made],
    needs: frozenset[str],
    is_sent: bool = False,
) -> _Had:
    """Look in the store first; ``is_sent`` asks for the saved form where there is no store, too."""
    if store is None or isinstance(key, str):
        why = "off" if store is None else f"not used ({key})"
        return _make(None, key, compile, why, is_sent)
    found = store.find(key)
    lacking = needs - set(found.entry.facts["checks"]) if found.entry else needs
    if found.entry is None or lacking:
        note = found.note if found.entry is None else f"the entry was not {min(lacking)}"
        return _make(store, key, compile, f"miss ({note})" if note else "miss", is_sent)
    facts, raw = found.entry.facts, found.entry.payload
    try:
        program = from_bytes(raw)
    except SaveError:
        store.drop(key)
        return _make(store, key, compile, "miss (the entry could not be read)", is_sent)
    old = tuple(f"{line} (cached)" for line in facts["lines"])
    hit = f"cache      hit: compiled in {facts['seconds']:.1f} s before, checked when it was"
    return _Had(Made(program, frozenset(facts["checks"]), (*old, hit)), raw)


def _make(
    store: Store | None,
    key: Key | str,
    compile: Callable[[], Made],
    why: str,
    is_sent: bool = False,
) -> _Had:
    """Compile, and keep the program if there is a store; ``why`` it was not found there."""
    start = time.perf_counter()
    made = compile()
    seconds = time.perf_counter() - start
    raw, kept = None, ""
    if store is not None or is_sent:
        try:
            raw = to_bytes(made.program)
        except SaveError as error:
            kept = f", not kept: {error.diagnostics[0].message}"
    if store is not None and isinstance(key, Key) and raw is not None:
        facts = {"checks": sorted(made.checks), "lines": made.lines, "seconds": seconds}
        wrong = store.keep(key, facts, raw)
        kept = f", not kept: it {wrong}" if wrong else ", kept"
    line = f"cache      {why}: compiled in {seconds:.1f} s{kept}"
    return _Had(Made(made.program, made.checks, (*made.lines, line)), raw)


def _numbers(key: Key | str) -> list[int]:
    """Return a key as two numbers, zeros for none."""
    text = key.text if isinstance(key, Key) else "0" * 32
    return [int(text[:15], 16), int(text[16:31], 16)]
