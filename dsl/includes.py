"""Find and read the files that a plan includes."""

from collections.abc import Callable
from pathlib import Path

from autoshard.diagnostics import Diagnostic
from autoshard.dsl.tree import Include
from autoshard.source import Source

MAX_DEPTH = 20

# Turns the name of a file, and of the file that includes it, into its source.
Loader = Callable[[str, Source], Source]


def read_beside(path: str, includer: Source) -> Source:
    """Read a file whose path is relative to that of the file which includes it."""
    place = Path(includer.name).parent / path
    return Source(str(place), place.read_text(encoding="utf-8"))


def load_include(include: Include, chain: tuple[Source, ...], load: Loader) -> Source | Diagnostic:
    """Return an included file, or what is wrong: it can't be read, or it includes itself."""
    try:
        source = load(include.path.text, chain[-1])
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        message = f"can't read the included file `{include.path.text}`"
        help = ("the path is relative to this file",)
        return Diagnostic("AS006", message, include.path.span, reason.lower(), help)
    if source.name in {other.name for other in chain} or len(chain) > MAX_DEPTH:
        message = f"`{include.path.text}` includes itself"
        way = " -> ".join([*(other.name for other in chain), source.name])
        return Diagnostic("AS006", message, include.path.span, "", (), (way,))
    return source
