"""Write the reference of the plan language from the schema, and the list of error codes.

`autoshard plan doc` prints it; `docs/plan-language.md` and `docs/error-codes.md` hold it, and a
test compares them. `python -m autoshard.dsl.doc DIR` writes both files.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from autoshard.dsl.codes import PAGES
from autoshard.dsl.foreign import HF_REFUSED, HF_STYLES
from autoshard.dsl.printer import show_setting, show_style
from autoshard.dsl.schema import BLOCK, SCHEMA, default_of
from autoshard.dsl.specs import BlockSpec, SettingSpec, StyleSpec
from autoshard.plan import Style

INTRODUCTION = """\
# The plan language, version 1

A plan says where and when a model is computed, never what: the losses and gradients of a plan are
those of the plain model. The few settings that change rounding are in `precision` and `fuse`.

```
autoshard 1                      # the language version comes first

include "base.plan"              # another plan; what this file says wins over it
let layers = transformer.h.*     # a variable, used as $layers

mesh { pp = 2, dp = auto, tp = 2 }

tensor {
  transformer.h.* {              # a scope: every path inside begins with it
    attn.c_attn: colwise(parts=3)
    attn.c_proj: rowwise
  }
  optional transformer.extra.*: replicate     # may match nothing
  override transformer.h.0.attn.c_proj: replicate   # wins over the rule above
  drop transformer.wte           # forget a rule of the included file
}

pipeline { split = even($layers) }
```

- Settings are `name = value`, rules are `path: style`. Items end at a new line, `,` or `;`.
- Quotes around paths and styles, and commas behind them, are accepted: the lines of a Hugging Face
  `tp_plan` can be pasted as they are. `autoshard plan fmt` drops them. A path that begins with a
  digit needs quotes.
- Paths match segment by segment: `*` within a segment, `**` any number of segments, `?` one
  character, `{a,b}` either, `[0..5]` and `[0,2]` numbers.
- A rule that matches nothing is an error unless it is `optional`. Two rules that claim one module
  are an error unless the later one says `override`.
- Sizes need a unit: bytes (`64MiB`, `500MB`) or elements (`500Melems`).
- The optimizer, clipping and data stay in Python.
- What is marked "planned" is checked but can't run in this version.
"""


def reference(only: str | None = None) -> str:
    """Return the reference in Markdown, of one block or of the whole language."""
    if only is not None:
        return "\n".join(_block(BLOCK[only]))
    parts = [INTRODUCTION, *("\n".join(_block(block)) for block in SCHEMA), "\n".join(_styles())]
    return "\n".join(parts)


def error_codes() -> str:
    """Return the pages of all codes in Markdown."""
    lines = ["# Error codes", "", "`autoshard explain AS304` prints one of them.", ""]
    for code, found in PAGES.items():
        lines += [f"## {code}: {found.title}", "", found.text, ""]
        examples = [f"{text}" for text in (found.wrong, found.right) if text]
        if len(examples) == 2:
            lines += ["Wrong, then right:", "", "```", *examples, "```", ""]
        elif examples:
            lines += ["```", *examples, "```", ""]
    return "\n".join(lines)


def _block(block: BlockSpec) -> Iterator[str]:
    yield f"## {block.name}\n"
    yield f"{block.doc}\n"
    yield "| setting | value | default | meaning |\n|---|---|---|---|"
    for setting in block.settings:
        columns = (_kind(setting), _default(block, setting), _doc(setting))
        yield f"| `{setting.name}` | {' | '.join(columns)} |"
    if block.styles:
        yield "\n| style | options | meaning |\n|---|---|---|"
        for style in block.styles:
            planned = "" if style.executable else " (planned)"
            yield f"| `{style.name}` | {_options(style)} | {style.doc}{planned} |"
    for note in block.notes:
        yield f"\n{note}"
    yield ""


def _styles() -> Iterator[str]:
    yield "## Hugging Face's names for styles\n"
    yield "| Hugging Face | here |\n|---|---|"
    for name, (style, options) in HF_STYLES.items():
        yield f"| `{name}` | `{show_style(BLOCK['tensor'], Style(style, options))}` |"
    for name, help in HF_REFUSED.items():
        yield f"| `{name}` | refused: {help} |"
    yield ""


def _kind(setting: SettingSpec) -> str:
    return setting.kind.describe().replace("|", r"\|")


def _default(block: BlockSpec, setting: SettingSpec) -> str:
    value = default_of(block.name, setting.name)
    if value is None or value == ():
        return ""
    return f"`{show_setting(block, setting.name, value)}`"


def _doc(setting: SettingSpec) -> str:
    if setting.executable is True:
        return setting.doc
    if setting.executable is False:
        return f"{setting.doc} (planned)"
    runs = ", ".join(f"`{value}`" for value in setting.executable)
    return f"{setting.doc} (runs today: {runs})"


def _options(style: StyleSpec) -> str:
    shown = []
    for option in style.options:
        planned = "" if option.executable else ", planned"
        shown.append(f"`{option.name}`: {option.doc} ({_kind(option)}{planned})")
    return "; ".join(shown)


def write(folder: Path) -> None:
    """Write both pages into a folder."""
    (folder / "plan-language.md").write_text(reference(), encoding="utf-8")
    (folder / "error-codes.md").write_text(error_codes(), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
