"""The page of each error code: what it means, an example, and the way out. Codes never change."""

from collections.abc import Mapping

from autoshard.dsl.codes_capture import CAPTURE_PAGES
from autoshard.dsl.codes_fit import FIT_PAGES
from autoshard.dsl.codes_text import TEXT_PAGES
from autoshard.dsl.specs import Page

PAGES: Mapping[str, Page] = {**TEXT_PAGES, **FIT_PAGES, **CAPTURE_PAGES}


def page(code: str) -> str:
    """Return the page of a code as text."""
    found = PAGES[code]
    lines = [f"{code}: {found.title}", "", *_wrapped(found.text)]
    examples = (("wrong", found.wrong), ("right", found.right))
    shown = [f"  {name}:  {text}" for name, text in examples if text]
    return "\n".join([*lines, *([""] if shown else []), *shown])


def _wrapped(text: str, width: int = 88) -> list[str]:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return [*lines, line]
