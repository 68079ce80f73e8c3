"""The commands. Each lives in a file of its own that is imported only when it is called.

To add a command: write `autoshard/cli/NAME.py` with `add_parser(subparsers)` and
`run(args) -> int`, and add its line to `COMMANDS`.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from autoshard import __version__
from autoshard.diagnostics import AutoshardError

# Command -> the line `autoshard --help` says about it. A command named a-b lives in a_b.py.
COMMANDS = {
    "plan": "check, format, show and draft plan files",
    "explain": "print the page of an error code, or what became of a name",
    "simulate": "print the grid, bubbles and memory of a pipeline schedule",
    "inspect": "compile a plan and show what became of a model",
    "diff": "compare two plans for one model: memory, traffic, bubble",
    "verify": "prove a plan equal to the plain model, and free of deadlock",
    "passes": "list the passes with their contracts",
    "cache": "list or clear the programs kept on disk",
    "env": "print versions, devices and built kernels, for bug reports",
}
USAGE_ERROR = 2
OUR_ERROR = 3
BUG = "this is a mistake in autoshard, not in your plan: please report it with the text above"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 good, 1 your mistake, 2 usage, 3 our mistake."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser(words).parse_args(words)
    except SystemExit as stop:  # argparse exits by itself: for --help and for wrong usage
        return stop.code if isinstance(stop.code, int) else USAGE_ERROR
    try:
        return args.run(args)
    except AutoshardError as error:
        return _report(error, args.debug)
    except BrokenPipeError:  # the reader of our output (a pager, `head`) went away: not a mistake
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # whatever else comes is a bug: say so instead of a bare traceback
        return _report_bug(error, args.debug)


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser; only the command that is called is imported to add its own options."""
    parser = argparse.ArgumentParser(
        prog="autoshard", description="Parallel training programs from a plain model and a plan."
    )
    parser.add_argument("--version", action="version", version=f"autoshard {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    called = next((word for word in words if not word.startswith("-")), None)
    for name, line in COMMANDS.items():
        if name == called:
            import_module(f"autoshard.cli.{name.replace('-', '_')}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=line)
    return parser


def _report(error: AutoshardError, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    else:
        print("\n".join([str(error), *getattr(error, "__notes__", ())]), file=sys.stderr)
    return error.exit_code


def _report_bug(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    print(f"internal error: {type(error).__name__}: {error}", file=sys.stderr)
    print(f"  at {os.path.basename(frame.filename)}:{frame.lineno}; {BUG}", file=sys.stderr)
    print("  `--debug` shows the traceback", file=sys.stderr)
    return OUR_ERROR
