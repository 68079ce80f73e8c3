"""`autoshard plan check|fmt|show|init|doc`: the commands about plan files.

Without `--model` nothing here imports torch.
"""

import argparse
from importlib import import_module

from autoshard.cli.common import STRICT_HELP, add_common, add_model, add_world

HELP = {
    "check": "say what is wrong with a plan, alone or against a model",
    "fmt": "lay out plan files",
    "show": "list what each rule matches, and the layers no rule touches",
    "init": "print a draft plan for a model",
    "doc": "print the reference of the plan language",
}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command and its own commands."""
    parser = subparsers.add_parser("plan", help="check, format, show and draft plan files")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, line in HELP.items():
        command = add_common(commands.add_parser(name, help=line, description=line))
        command.set_defaults(run=run, plan_command=name)
        _OPTIONS[name](command)


def run(args: argparse.Namespace) -> int:
    """Run one of them; each is imported only then."""
    return import_module(f"autoshard.cli.plan_{args.plan_command}").run(args)


def add_sets(parser: argparse.ArgumentParser) -> None:
    """Add `--set`."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="K=V",
        dest="sets",
        help="put a setting on top of the plan: --set mesh.tp=4",
    )


def _check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="plan files; - is standard input")
    add_model(parser, required=False)
    add_world(parser)
    add_sets(parser)
    parser.add_argument("--strict", action="store_true", help=STRICT_HELP)
    parser.add_argument("--format", choices=("text", "json", "github"), default="text")


def _fmt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="plan files; - is standard input")
    parser.add_argument(
        "--check", action="store_true", help="change nothing, fail when something would change"
    )


def _show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="plan file; - is standard input")
    parser.add_argument("glob", nargs="?", metavar="GLOB", help="show only these modules")
    add_model(parser)
    add_world(parser)
    add_sets(parser)


def _init(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_world(parser)
    parser.add_argument(
        "--from",
        dest="origin",
        choices=("shapes", "hf"),
        default="shapes",
        help="where the rules come from: guessed from the layers, or Hugging Face's tp_plan",
    )


def _doc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("block", nargs="?", help="one block only")


_OPTIONS = {"check": _check, "fmt": _fmt, "show": _show, "init": _init, "doc": _doc}
