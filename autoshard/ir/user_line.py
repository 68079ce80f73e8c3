"""The user's own source line out of a stack trace: not torch's, not a library's plumbing."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable

import torch

from autoshard.source import Source, Span

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$')
_SOURCE = re.compile(r"^(?P<file>[^:]+):(?P<line>\d+)(?:: (?P<code>.*))?$")
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STDLIB = sysconfig.get_paths()["stdlib"]
_TESTING = os.path.join(_OURS, "testing")
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
# Transformers' models are user code for our purpose, its helpers are not.
_MODELING = re.compile(r"[/\\]transformers[/\\]models[/\\]")
# Code of no file: of `python -c`, a pipe, a prompt or a notebook.
_TYPED = re.compile(r"<(string|stdin|(i?python-)?input.*|ipython.*)>$")
Frame = tuple[str, int, str]  # file, line, code


def user_line(trace: str | None) -> str:
    """Return "model.py:42: x = self.fc(x)" for the innermost frame of user code, "" without one.

    User code is what lies outside installed packages, or a modeling file of transformers; without
    any of these it is the innermost frame of a library other than torch.
    """
    return _choose(_frames(trace or ""))


def line_of_traceback(error: BaseException) -> str:
    """Return the user's line, as ``user_line`` does, that ``error`` was raised from."""
    return _choose(_plain(traceback.extract_tb(error.__traceback__)))


def line_here() -> str:
    """Return the user's line, as ``user_line`` does, that led to the caller."""
    return _choose(_plain(traceback.extract_stack()))


def span_of(source: str) -> Span | None:
    """Return a place to point at for a source such as "model.py:42: x = self.fc(x)"."""
    match = _SOURCE.match(source)
    if match is None:
        return None
    line, code = int(match["line"]), match["code"] or ""
    text = "\n" * (line - 1) + code
    return Span(Source(match["file"], text), line - 1, len(text))


def place_of(source: str) -> str:
    """Return the "model.py:42" of a source."""
    return ":".join(source.split(":", 2)[:2])


def _choose(frames: Iterable[Frame]) -> str:
    frames = tuple(frames)
    known = [frame for frame in frames if not _is_plumbing(frame[0])]
    own = [frame for frame in known if _is_model_code(frame[0])]
    typed = [frame for frame in frames if _TYPED.match(frame[0])]
    found = own or known or typed
    return _text(*found[-1]) if found else ""


def _text(file: str, line: int, code: str) -> str:
    place = f"{os.path.basename(file)}:{line}"
    code = code or linecache.getline(file, line).strip()
    return f"{place}: {code}" if code else place


def _frames(trace: str) -> list[Frame]:
    lines = trace.splitlines()
    found = []
    for number, line in enumerate(lines):
        match = _FRAME.match(line)
        if match is None:
            continue
        code = lines[number + 1].strip() if number + 1 < len(lines) else ""
        code = "" if _FRAME.match(code) else code
        found.append((match["file"], int(match["line"]), code))
    return found


def _plain(summary: traceback.StackSummary) -> list[Frame]:
    return [(frame.filename, frame.lineno or 0, frame.line or "") for frame in summary]


def _is_plumbing(file: str) -> bool:
    if file.startswith("<"):
        return True
    path = os.path.abspath(file)
    if path.startswith(_TESTING):
        return False
    if path.startswith((_TORCH, _OURS)):
        return True
    return path.startswith(_STDLIB) and not _LIBRARY.search(path)


def _is_model_code(file: str) -> bool:
    return not _LIBRARY.search(file) or bool(_MODELING.search(file))
