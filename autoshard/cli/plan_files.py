"""Read plan files for the commands; `-` is standard input."""

import sys

from autoshard.diagnostics import PlanError
from autoshard.dsl.load import read_source
from autoshard.source import Source

STDIN = "-"


def read(name: str) -> Source:
    """Return the text of a plan file, or of standard input."""
    if name != STDIN:
        return read_source(name)
    try:
        return Source("<stdin>", sys.stdin.read())
    except UnicodeDecodeError as error:
        raise PlanError("standard input isn't UTF-8 text", code="AS007") from error
