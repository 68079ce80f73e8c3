"""The user's own source line out of a stack trace: not torch's, not a library's plumbing."""

from __future__ import annotations

import os
import re
import sysconfig

import torch

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$')
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STDLIB = sysconfig.get_paths()["stdlib"]
_TESTING = os.path.join(_OURS, "testing")
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
# Transformers' models are user code for our purpose, its helpers are not.
_MODELING = re.compile(r"[/\\]transformers[/\\]models[/\\]")


def user_line(trace: str | None) -> str:
    """Return "model.py:42: x = self.fc(x)" for the innermost frame of user code, "" without one.

    The innermost frame outside all installed packages wins; then a modeling file of transformers;
    then any library but torch.
    """
    frames = [f for f in _frames(trace or "") if not _is_plumbing(f[0])]
    if not frames:
        return ""
    modeling = [f for f in frames if _is_model_code(f[0])]
    file, line, code = (modeling or frames)[-1]
    place = f"{os.path.basename(file)}:{line}"
    return f"{place}: {code}" if code else place


def place_of(source: str) -> str:
    """Return the "model.py:42" of a node's source."""
    return ":".join(source.split(":", 2)[:2])


def _frames(trace: str) -> list[tuple[str, int, str]]:
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
