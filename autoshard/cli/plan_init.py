"""`autoshard plan init`: print a draft plan for a model, laid out and checked."""

import argparse
import sys

from autoshard.cli.common import Built, build_model
from autoshard.cli.plan_check import check
from autoshard.diagnostics import AutoshardError, PlanError, render
from autoshard.dsl.draft import choose_degrees, draft
from autoshard.dsl.formatter import format_text
from autoshard.model_facts import ModelFacts, Proposal
from autoshard.source import Source

GUESSED = "rules guessed from the names of layers, not from what the model computes"


def run(args: argparse.Namespace) -> int:
    """Print the draft; what doesn't fit yet goes to standard error."""
    from autoshard.ir.facts import describe

    built = build_model(args.model)
    facts = describe(built.model)
    if args.origin == "hf" and not facts.hf_tp_plan:
        help = "leave out `--from hf`: the rules are then found in the model's graph"
        raise PlanError(f"{facts.class_name} brings no tp_plan", code="AS205", help=help)
    proposal, note = None, ""
    if args.origin != "hf":
        proposal, note = _proposal(built, choose_degrees(facts, args.world).tp)
    text = _text(built, facts, args, proposal, note)
    print(text, end="")
    found = check(Source("draft", text), (), facts, args.world).diagnostics
    for diagnostic in found:
        print(f"\n{render(diagnostic)}", file=sys.stderr)
    return 0


def _text(
    built: Built,
    facts: ModelFacts,
    args: argparse.Namespace,
    proposal: Proposal | None,
    note: str,
) -> str:
    text = draft(facts, args.world, args.origin, proposal, _samples(built.batch), note)
    return format_text(Source("draft", text))


def _samples(batch: object) -> int:
    """Return the number of samples of an example batch, 1 without one."""
    from autoshard.ir.batch import batch_leaves

    if batch is None:
        return 1
    return max((leaf.shape[0] for leaf in batch_leaves(batch).values() if leaf.dim()), default=1)


def _proposal(built: Built, tp: int) -> tuple[Proposal | None, str]:
    """Capture the model and follow its graph; without a batch or where that fails, say so."""
    from autoshard.ir.capture import capture
    from autoshard.ir.propose import propose
    from autoshard.mesh import Mesh

    if built.batch is None:
        return None, f"{GUESSED}: --model gives no batch"
    try:
        program = capture(built.model, built.batch, built.loss, mesh=Mesh(()), compare=False)
    except AutoshardError as error:
        return None, f"{GUESSED}: {str(error).splitlines()[0]}"
    return propose(program, max(tp, 2)), ""
