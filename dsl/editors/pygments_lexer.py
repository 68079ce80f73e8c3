"""A Pygments lexer for plans; installed with autoshard, found by the name `autoshard-plan`."""

from pygments.lexer import RegexLexer, bygroups
from pygments.token import (
    Comment,
    Keyword,
    Name,
    Number,
    Operator,
    Punctuation,
    String,
    Text,
)


class PlanLexer(RegexLexer):
    """Colour plan files."""

    name = "autoshard plan"
    aliases = ("autoshard-plan",)
    filenames = ("*.plan",)

    tokens = {  # noqa: RUF012 - Pygments reads a plain class attribute
        "root": [
            (r"#[^\n]*", Comment.Single),
            (r'"[^"\n]*"', String.Double),
            (r"\b(autoshard|include|let|use|drop)\b(?!\s*[.=:{])", Keyword),
            (r"\b(override|optional)(?=[ \t]+[\"\w*{])", Keyword.Pseudo),
            (r"([A-Za-z_]\w*)(\s*)(=)", bygroups(Name.Attribute, Text, Operator)),
            (r"([A-Za-z_]\w*)(\s*)(\{)", bygroups(Name.Class, Text, Punctuation)),
            (r"(:)(\s*)([A-Za-z_]\w*)", bygroups(Punctuation, Text, Name.Function)),
            (r"\$[A-Za-z_]\w*", Name.Variable),
            (r"\d[\w./%]*", Number),
            (r"[A-Za-z_*?][\w*?.\-]*|[*?]", Name),
            (r"[{}()\[\]:=,;.]", Punctuation),
            (r"\s+", Text),
        ],
    }
