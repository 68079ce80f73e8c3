"""`autoshard plan init`: print a draft plan for a model, laid out and checked."""

import argparse
import sys

from autoshard.cli.plan_check import check, model_facts
from autoshard.diagnostics import PlanError, render
from autoshard.dsl.draft import draft
from autoshard.dsl.formatter import format_text
from autoshard.source import Source


def run(args: argparse.Namespace) -> int:
    """Print the draft; what doesn't fit yet goes to standard error."""
    facts = model_facts(args.model)
    if args.origin == "hf" and not facts.hf_tp_plan:
        help = "leave out `--from hf`: the rules are then guessed from the layers"
        raise PlanError(f"{facts.class_name} brings no tp_plan", code="AS205", help=help)
    text = format_text(Source("draft", draft(facts, args.world, args.origin)))
    print(text, end="")
    found = check(Source("draft", text), (), facts, args.world).diagnostics
    for diagnostic in found:
        print(f"\n{render(diagnostic)}", file=sys.stderr)
    return 0
