"""Write the TextMate grammar from the schema; a test keeps the file beside this one current.

`python -m autoshard.dsl.editors.textmate` writes it.
"""

import json
from pathlib import Path
from typing import Any

from autoshard.dsl.schema import SCHEMA

FILE = Path(__file__).with_name("autoshard-plan.tmLanguage.json")


def grammar() -> dict[str, Any]:
    """Return the grammar."""
    blocks = "|".join(block.name for block in SCHEMA)
    styles = "|".join(style.name for block in SCHEMA for style in block.styles)
    settings = "|".join(setting.name for block in SCHEMA for setting in block.settings)
    patterns = (
        ("comment.line.number-sign", r"#.*$"),
        ("string.quoted.double", r'"[^"\n]*"'),
        ("keyword.control", r"^\s*(autoshard|include|let|use|drop)\b"),
        ("storage.modifier", r"\b(override|optional)(?=\s+[\w\"*{])"),
        ("entity.name.section", rf"\b({blocks})(?=\s*(on\s+\w+\s*)?\{{)"),
        ("support.type.property-name", rf"\b({settings})(?=\s*=)"),
        ("support.function", rf"(?<=:)\s*({styles})\b"),
        ("variable.other", r"\$[A-Za-z_]\w*"),
        ("constant.numeric", r"(?<![\w.])\d[\w./%]*"),
        ("constant.language", r"(?<==)\s*(auto|on|off)\b"),
    )
    return {
        "name": "autoshard plan",
        "scopeName": "source.autoshard-plan",
        "fileTypes": ["plan"],
        "patterns": [{"name": f"{n}.autoshard-plan", "match": match} for n, match in patterns],
    }


def text() -> str:
    """Return the grammar as the text of its file."""
    return json.dumps(grammar(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
