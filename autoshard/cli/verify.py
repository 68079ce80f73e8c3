"""`autoshard verify`: prove a plan equal to the plain model before anything is launched."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from autoshard.cli.common import (
    UsageError,
    add_common,
    add_model,
    build_model,
    print_diagnostics,
)
from autoshard.cli.plan_files import read_plan
from autoshard.dsl.resolve import resolve
from autoshard.schedule.check import check_schedule
from autoshard.schedule.read import read_schedule

STRICT = "fail on the plan's warnings and on anything unproven, too"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command."""
    parser = subparsers.add_parser("verify", help="prove a plan equal to the plain model")
    parser.add_argument("plan", metavar="PLAN", nargs="?", help="a plan file")
    add_model(parser, required=False)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="K=V")
    parser.add_argument("--no-numbers", action="store_true", help="static checks only")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps in lock step")
    parser.add_argument("--schedule", metavar="CSV", help="check a schedule alone (torch's CSV)")
    parser.add_argument("--strict", action="store_true", help=STRICT)
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the verdict; 3 when the program is wrong, our mistake; 1 with --strict on unproven."""
    if args.schedule:
        return _run_schedule(args.schedule, args.json)
    if not args.plan or not args.model:
        raise UsageError("`verify` proves a plan: give a PLAN and --model, or --schedule CSV")
    from autoshard.ir.facts import describe
    from autoshard.verify import verify

    built = build_model(args.model)
    plan = read_plan(args.plan, args.sets, args.strict)
    resolved = resolve(plan, describe(built.model))
    if args.strict:
        resolved.require_no_warnings()
    print_diagnostics(resolved.warnings, file=sys.stderr)
    verdict = verify(
        built.model,
        plan,
        built.batch,
        built.loss,
        numbers=not args.no_numbers,
        steps=args.steps,
    )
    print(json.dumps(verdict.to_json(), indent=2) if args.json else verdict)
    if not verdict.is_good:
        text = "this is a mistake of ours: please report it with the plan and the rows above"
        print(text, file=sys.stderr)
        return 3
    return 1 if args.strict and not verdict.is_complete else 0


def _run_schedule(path: str, as_json: bool) -> int:
    """Check a schedule made elsewhere: complete, in order, and free of deadlock."""
    check = check_schedule(read_schedule(Path(path)))
    print(json.dumps(check.to_json(), indent=2) if as_json else check)
    return 0 if check.is_good else 1
