"""Values of the tree as text, and the messages about wrong ones."""

import re

from autoshard.diagnostics import Diagnostic
from autoshard.dsl.suggest import did_you_mean
from autoshard.dsl.tree import CallValue, ListValue, Quantity, String, Value, Variable, Word

# Words of the grammar: a path that is one of them needs quotes.
KEYWORDS = ("autoshard", "include", "let", "on", "use", "drop", "override", "optional")
PATH = re.compile(
    r"(?:[A-Za-z_*?]|\{[\w*,]+\})(?:[\w*?\-]|\{[\w*,]+\})*"
    r"(?:\.(?:\[[\d.,]+\]|(?:[\w*?\-]|\{[\w*,]+\})+))*"
)


def wrong_word(
    name: str, node: Value, words: tuple[str, ...], synonyms: dict[str, str] | None = None
) -> Diagnostic:
    """Return the message for a word that isn't one of those a setting takes."""
    given = written(node)
    help = (*did_you_mean(given, words, synonyms), f"one of: {', '.join(words)}")
    return wrong(node, "AS122", f"`{name}` can't be `{given}`", "", help)


def written(node: Value) -> str:
    """Return a value as text, the way the formatter writes it."""
    if isinstance(node, ListValue):
        return f"[{', '.join(written(item) for item in node.items)}]"
    if isinstance(node, CallValue):
        names = (f"{arg.name.text}=" if arg.name else "" for arg in node.args)
        args = (f"{name}{written(arg.value)}" for name, arg in zip(names, node.args, strict=True))
        return f"{node.name}({', '.join(args)})" if node.args else node.name
    if isinstance(node, String):
        return f'"{node.text}"'
    return f"${node.text}" if isinstance(node, Variable) else node.text


def quoted(path: str) -> str:
    """Return a path as a plan writes it: in quotes only where the language needs them."""
    bare = PATH.fullmatch(path) and path not in KEYWORDS
    return path if bare else f'"{path}"'


def text_of(node: Value) -> str:
    """Return the text of a plain value, nothing for a list, a call or a variable."""
    return node.text if isinstance(node, Word | Quantity | String) else ""


def wrong(
    node: Value,
    code: str,
    message: str,
    label: str = "",
    help: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> Diagnostic:
    """Return the message about one value, placed at it."""
    return Diagnostic(code, message, node.span, label, help, notes)
