"""`autoshard explain CODE`: print the page of an error code."""

import argparse

from autoshard.cli.common import add_common
from autoshard.diagnostics import AutoshardError


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command."""
    parser = add_common(subparsers.add_parser("explain", help="print the page of an error code"))
    parser.add_argument("code", help="an error code, such as AS304")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the page."""
    raise AutoshardError("not built yet")
