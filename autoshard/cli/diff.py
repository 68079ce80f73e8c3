"""`autoshard diff`: two plans for one model side by side - memory, traffic, bubble."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from autoshard.cli.common import add_common, add_model, build_model
from autoshard.cli.inspect import has_host, plan_optimizer
from autoshard.cli.plan_files import read
from autoshard.dsl.load import load

if TYPE_CHECKING:
    from autoshard.frontend import Compiled


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command."""
    parser = subparsers.add_parser("diff", help="compare two plans: memory, traffic, bubble")
    parser.add_argument("plans", metavar="PLAN", nargs=2, help="two plan files")
    add_model(parser)
    add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile both plans and print one line a figure."""
    from tabulate import tabulate

    columns = [_figures(args.model, path) for path in args.plans]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
    print(tabulate(rows, ["", *args.plans], disable_numparse=True))
    return 0


def _figures(model: str, path: str) -> dict[str, str]:
    """Return the figures of one plan by name."""
    from autoshard.frontend import compile_plan

    built = build_model(model)
    plan = load(read(path)).require()
    return _tabled(compile_plan(built.model, plan, built.batch, built.loss))


def _tabled(compiled: Compiled) -> dict[str, str]:
    from autoshard.cost.peak import CATEGORIES
    from autoshard.cost.replay import peaks
    from autoshard.cost.report import mesh_text
    from autoshard.cost.traffic import traffic
    from autoshard.schedule.simulate import simulate
    from autoshard.units import show_bytes

    program = compiled.program
    plan = compiled.resolved.plan
    found = peaks(program, plan_optimizer(plan), has_host=has_host(plan))
    fullest = max(found, key=lambda peak: peak.total)
    figures = {"mesh": mesh_text(program.mesh)}
    for name in CATEGORIES:
        figures[f"{name}, fullest rank"] = show_bytes(fullest.sizes.get(name, 0))
    figures["together, fullest rank"] = show_bytes(fullest.total)
    if fullest.host:
        figures["on the host, fullest rank"] = show_bytes(fullest.host)
    wire: dict[str, int] = {}
    for row in traffic(program):
        key = f"{row.axis} {row.kind}, most of any stage"
        wire[key] = max(wire.get(key, 0), row.wire_bytes)
    figures |= {key: show_bytes(nbytes) for key, nbytes in sorted(wire.items())}
    assert program.schedule is not None  # a program compiled to the end has one
    figures["step bubble"] = f"{float(simulate(program.schedule).step_bubble):.1%}"
    return figures
