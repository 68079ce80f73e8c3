"""The passes by name, and the text form of a pass: ``prefetch-gathers{depth=2}``."""

from __future__ import annotations

import re
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from autoshard.compiler.pass_base import Pass
from autoshard.diagnostics import PassError

_passes: dict[str, type[Pass]] = {}


def register(cls: type[Pass]) -> type[Pass]:
    """Add a pass class to the registry; refuse one imported under a second module name."""
    root = cls.__module__.split(".", 1)[0]
    if root in ("passes", "dsl"):
        raise PassError(
            f"pass '{cls.name}' was imported as '{cls.__module__}'",
            help=(f"import it as 'autoshard.{cls.__module__}'",),
        )
    known = _passes.setdefault(cls.name, cls)
    if known is not cls and known.__module__ != cls.__module__:
        raise PassError(f"two passes are called '{cls.name}': {known.__module__}, {cls.__module__}")
    _passes[cls.name] = cls
    return cls


def registered() -> dict[str, type[Pass]]:
    """Return name -> class of every registered pass."""
    return dict(_passes)


def parse_pass(text: str) -> Pass:
    """Return the pass that ``text`` spells: the inverse of ``str(pass)``."""
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\{(.*)\})?\s*", text)
    if match is None:
        raise PassError(f"'{text}' is not a pass", help=("write name or name{option=value}",))
    name, options = match.groups()
    if name not in _passes:
        close = get_close_matches(name, _passes, 1)
        hint = f"did you mean '{close[0]}'?" if close else f"passes: {', '.join(_passes)}"
        raise PassError(f"unknown pass '{name}'", help=(hint,))
    return _passes[name](**_parse_options(_passes[name], options or ""))


def _parse_options(cls: type[Pass], text: str) -> dict[str, object]:
    defaults = {f.name: f.default for f in fields(cls)}
    options = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = item.partition("=")
        if key not in defaults:
            known = ", ".join(defaults) or "none"
            raise PassError(f"pass '{cls.name}' has no option '{key}'", help=(f"options: {known}",))
        options[key] = _parse_value(cls, key, value, defaults[key])
    return options


def _parse_value(cls: type[Pass], key: str, text: str, default: Any) -> object:
    try:
        if isinstance(default, bool):
            return {"True": True, "False": False}[text]
        return type(default)(text)
    except (KeyError, ValueError) as error:
        kind = type(default).__name__
        raise PassError(f"option '{key}' of '{cls.name}' can't be '{text}': need {kind}") from error
