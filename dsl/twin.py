"""Write plan text from Python values: what `autoshard.Plan(mesh={"tp": 2}, ...)` stands for.

Plans built in Python go through the same text, so the same checks and messages hold for them.
"""

from collections.abc import Iterator, Mapping

from autoshard.diagnostics import PlanError
from autoshard.dsl.compound_values import Globs
from autoshard.dsl.nodes import quoted
from autoshard.dsl.printer import show_style
from autoshard.dsl.schema import BLOCK
from autoshard.dsl.specs import BlockSpec
from autoshard.plan import Call, Style
from autoshard.units import Size

MARKS = ("override ", "optional ")


def text_of_blocks(blocks: Mapping[str, Mapping[str, object]]) -> str:
    """Return a plan file that says what the mappings say, block by block, in their order.

    Keys that are settings of the block become settings, all others rules; a mapping as a value is
    a scope. A value that is a string is taken as the language writes it: `"colwise(parts=3)"`.
    """
    texts = ["autoshard 1\n"]
    for name, items in blocks.items():
        if not isinstance(items, Mapping):
            kind = type(items).__name__
            help = f"write {name}={{...}}"
            raise PlanError(f"`{name}` needs a mapping, not {kind}", code="AS125", help=help)
        spec = BLOCK.get(name)
        lines = [f"  {line}\n" for line in _items(spec, items, top=True)]
        texts.append(f"{name} {{\n{''.join(lines)}}}\n")
    return "\n".join(texts)


def _items(spec: BlockSpec | None, items: Mapping[str, object], top: bool) -> Iterator[str]:
    for key, value in items.items():
        if not isinstance(key, str) or "\n" in key or '"' in key:
            raise PlanError(f"{key!r} can't be a path or a setting", code="AS125")
        if isinstance(value, Mapping):
            yield f"{quoted(key)} {{"
            yield from (f"  {line}" for line in _items(spec, value, top=False))
            yield "}"
        elif top and key == "use":
            yield f"use {value}"
        elif spec is not None and spec.styles and not (top and spec.setting(key)):
            yield _rule(spec, key, value)
        else:
            yield f"{key} = {_setting(spec, key, value)}"


def _rule(spec: BlockSpec, key: str, value: object) -> str:
    mark = next((mark for mark in MARKS if key.startswith(mark)), "")
    style = show_style(spec, value) if isinstance(value, Style) else _one_line(key, value)
    return f"{mark}{quoted(key.removeprefix(mark))}: {style}"


def _setting(spec: BlockSpec | None, key: str, value: object) -> str:
    setting = spec.setting(key) if spec else None
    if setting is not None and isinstance(setting.kind, Globs) and value not in setting.kind.words:
        globs = (value,) if isinstance(value, str) else value
        if isinstance(globs, list | tuple) and all(isinstance(glob, str) for glob in globs):
            return setting.kind.show(tuple(globs))
    if setting is not None and isinstance(value, Call):
        return setting.kind.show(value)
    return _one_line(key, value)


def _one_line(key: str, value: object) -> str:
    """Return a Python value as the language writes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_one_line(key, item) for item in value)}]"
    if isinstance(value, int | float | Size) or (isinstance(value, str) and "\n" not in value):
        return str(value)
    message = f"`{key}` can't be {value!r}"
    help = "plans hold numbers, words, lists and on or off"
    raise PlanError(message, code="AS125", help=help)
