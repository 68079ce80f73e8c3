"""Read plan files for the commands; `-` is standard input."""

import sys
from collections.abc import Iterable

from autoshard.cli.common import print_diagnostics
from autoshard.diagnostics import PlanError
from autoshard.dsl.load import load, read_source
from autoshard.plan import Plan
from autoshard.source import Source

STDIN = "-"


def read_plan(name: str, sets: Iterable[str], strict: bool) -> Plan:
    """Return a plan; the warnings of its text are printed beside the output, or are errors."""
    loaded = load(read(name), sets)
    plan = loaded.require(strict)
    print_diagnostics(loaded.diagnostics, file=sys.stderr)
    return plan


def read(name: str) -> Source:
    """Return the text of a plan file, or of standard input."""
    if name != STDIN:
        return read_source(name)
    try:
        return Source("<stdin>", sys.stdin.read())
    except UnicodeDecodeError as error:
        raise PlanError("standard input isn't UTF-8 text", code="AS007") from error
