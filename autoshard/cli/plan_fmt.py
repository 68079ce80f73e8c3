"""`autoshard plan fmt`: lay out plan files in place; `-` reads standard input and prints."""

import argparse
import sys
from pathlib import Path

from autoshard.cli.plan_files import STDIN, read
from autoshard.diagnostics import PlanError
from autoshard.dsl.formatter import format_text


def run(args: argparse.Namespace) -> int:
    """Format every file; with `--check` only say which would change, 1 when one would."""
    changed = 0
    for name in args.files:
        source = read(name)
        text = format_text(source)
        if args.check:
            changed += text != source.text
            if text != source.text:
                print(f"would reformat {name}")
        elif name == STDIN:
            sys.stdout.write(text)
        elif text != source.text:
            _write(name, text)
            print(f"reformatted {name}")
    if args.check and not changed:
        print(f"{len(args.files)} file(s) well formatted")
    return 1 if changed else 0


def _write(name: str, text: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"can't write `{name}`: {(error.strerror or 'error').lower()}") from error
