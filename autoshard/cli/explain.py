"""`autoshard explain`: the page of an error code, or the life of a name through the passes."""

import argparse
import re

from autoshard.cli.common import add_common, add_model, add_world, build_model
from autoshard.cli.plan_files import read
from autoshard.diagnostics import AutoshardError
from autoshard.dsl.codes import PAGES, page
from autoshard.dsl.load import load

_CODE = re.compile(r"AS\d+", re.IGNORECASE)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command."""
    help = "print the page of an error code, or what became of a parameter, module or value"
    parser = subparsers.add_parser("explain", help=help)
    parser.add_argument(
        "name",
        nargs="?",
        help="an error code, such as AS304 (none lists them all), or, with --plan and --model, the "
        "name of a parameter, a module or a printed value",
    )
    parser.add_argument("--plan", metavar="PLAN", help="the plan file to follow the name through")
    add_model(parser, required=False)
    add_world(parser)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="K=V")
    add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the list of codes, a page, or a life."""
    if args.name is None:
        print("\n".join(f"{code}  {found.title}" for code, found in PAGES.items()))
    elif args.plan is not None and args.model is not None:
        print(_life(args))
    elif args.name.upper() in PAGES:
        print(page(args.name.upper()))
    elif _CODE.fullmatch(args.name):
        help = "`autoshard explain` lists them all"
        raise AutoshardError(f"there is no error code `{args.name}`", help=help)
    else:
        raise AutoshardError(
            f"`{args.name}` is no error code; what became of a name is told for a plan and a model",
            help=f"autoshard explain {args.name} --plan PLAN --model file.py:function",
        )
    return 0


def _life(args: argparse.Namespace) -> str:
    from autoshard.frontend import compile_plan
    from autoshard.ir.life import Life

    life, built = Life(args.name), build_model(args.model)
    compile_plan(
        built.model,
        load(read(args.plan), args.sets).require(),
        built.batch,
        built.loss,
        world_size=args.world,
        observe=lambda step, program: life.watch(step.name, program),
    )
    return life.text()
