"""`autoshard explain CODE`: print the page of an error code."""

import argparse

from autoshard.cli.common import add_common
from autoshard.diagnostics import AutoshardError
from autoshard.dsl.codes import PAGES, page


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command."""
    parser = add_common(subparsers.add_parser("explain", help="print the page of an error code"))
    parser.add_argument("code", nargs="?", help="an error code, such as AS304; none lists them all")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the page, or the list of codes."""
    if args.code is None:
        print("\n".join(f"{code}  {found.title}" for code, found in PAGES.items()))
        return 0
    code = args.code.upper()
    if code not in PAGES:
        help = "`autoshard explain` lists them all"
        raise AutoshardError(f"there is no error code `{args.code}`", help=help)
    print(page(code))
    return 0
