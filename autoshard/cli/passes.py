"""`autoshard passes`: the passes in their default order, with their contracts."""

from __future__ import annotations

import argparse

from autoshard.cli.common import add_common


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command."""
    parser = subparsers.add_parser("passes", help="list the passes with their contracts")
    add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one line a pass."""
    from tabulate import tabulate

    from autoshard.passes.pipelines import default_pipeline

    rows = [
        [
            step.group,
            step.name,
            (step.__doc__ or "").splitlines()[0],
            _names(step.assumes),
            _names(step.establishes),
            _names(step.breaks),
            step.numerics.value,
        ]
        for step in default_pipeline().passes
    ]
    heads = ["group", "pass", "what it does", "assumes", "establishes", "breaks", "numerics"]
    print(tabulate(rows, heads))
    return 0


def _names(invariants: frozenset[str]) -> str:
    return " ".join(sorted(invariants)) or "-"
