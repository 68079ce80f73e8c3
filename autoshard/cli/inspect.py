"""`autoshard inspect`: what a plan makes of a model - passes, memory, traffic, schedule, graphs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from autoshard.cli.common import (
    STRICT_HELP,
    ModelError,
    UsageError,
    add_common,
    add_model,
    add_world,
    build_model,
    print_diagnostics,
)
from autoshard.cli.plan_files import read, read_plan
from autoshard.dsl.load import load
from autoshard.plan import Plan

if TYPE_CHECKING:
    from autoshard.frontend import Compiled
    from autoshard.ir.graph_function import GraphFunction
    from autoshard.ir.program import Program

PASS_HELP = "show the program after this pass, or after the last pass of this group: capture, "
PASS_HELP += "fuse, tensor, pipeline, joint, zero, schedule"
TABLE_HELP = "only the model state of each ZeRO stage for so many parameters, such as 7.5B,128B,1T"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command."""
    parser = subparsers.add_parser("inspect", help="compile a plan and show what became of a model")
    parser.add_argument("plan", metavar="PLAN", nargs="?", help="a plan file")
    add_model(parser, required=False)
    add_world(parser)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="K=V")
    parser.add_argument("--pass", dest="until", metavar="NAME", help=PASS_HELP)
    parser.add_argument("--diff", action="store_true", help="with --pass: only what it changed")
    parser.add_argument("--stage", type=int, help="with --pass: the stage to show")
    parser.add_argument("--phase", default=None, help="with --pass: only graph F, I, W, U or R")
    parser.add_argument("--full", action="store_true", help="do not fold identical layers")
    parser.add_argument("--remarks", action="store_true", help="show what the passes remarked")
    parser.add_argument("--json", action="store_true", help="print the tables as one JSON object")
    parser.add_argument("--zero-table", metavar="SIZES", help=TABLE_HELP)
    parser.add_argument("--strict", action="store_true", help=STRICT_HELP)
    add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile and print; no process group, no GPU, nothing is trained.

    `--zero-table` compiles nothing: sizes are numbers of parameters.
    """
    if args.zero_table:
        print(_zero_table(args))
        return 0
    if args.plan is None or args.model is None:
        raise UsageError(
            "`inspect` compiles a model by a plan: give PLAN and --model P:F",
            help="`inspect --zero-table 7.5B` needs neither",
        )
    _refuse_idle_options(args)
    plan = read_plan(args.plan, args.sets, args.strict)
    compiled = _compile(args, plan, args.until)
    print_diagnostics(compiled.resolved.warnings, file=sys.stderr)
    if args.until:
        print(_pass_text(args, plan, compiled))
    else:
        print(_as_json(compiled) if args.json else _report(args, compiled))
    return 0


def _refuse_idle_options(args: argparse.Namespace) -> None:
    """Refuse options that change nothing of what is printed: graphs with --pass, else tables."""
    of_graphs = {"diff": args.diff, "full": args.full, "phase": args.phase}
    of_graphs["stage"] = args.stage is not None
    of_tables = {"json": args.json, "remarks": args.remarks}
    idle = [name for name, given in (of_tables if args.until else of_graphs).items() if given]
    if idle:
        raise UsageError(
            f"`--{idle[0]}` changes nothing {'with' if args.until else 'without'} `--pass`",
            help=f"{'drop' if args.until else 'add'} `--pass`, or drop `--{idle[0]}`",
        )


def _compile(args: argparse.Namespace, plan: Plan, until: str | None = None) -> Compiled:
    from autoshard.frontend import compile_plan

    built = build_model(args.model)
    return compile_plan(
        built.model,
        plan,
        built.batch,
        built.loss,
        world_size=args.world,
        until=until,
        strict=args.strict,
    )


def _zero_table(args: argparse.Namespace) -> str:
    """Return the table for the plan's precision, or for the paper's where there is no plan."""
    from autoshard.cost.zero_table import PAPER_PRECISION, read_count, zero_table

    sizes = args.zero_table.split(",")
    odd = next((size for size in sizes if read_count(size) is None), None)
    if odd is not None:
        raise UsageError(
            f"`--zero-table {args.zero_table}`: '{odd}' is no number of parameters",
            help="write 350M, 7.5B or 1T, several with commas between",
        )
    if args.plan is None:
        return zero_table(sizes, PAPER_PRECISION)
    return zero_table(sizes, load(read(args.plan), args.sets).require().precision)


def _report(args: argparse.Namespace, compiled: Compiled) -> str:
    from autoshard.cost import report

    program, resolved = compiled.program, compiled.resolved
    planned = [f"planned, not executable yet: {text}" for text, _ in resolved.not_executable]
    sections = [
        f"plan   {args.plan}      mesh {report.mesh_text(program.mesh)}      batch "
        f"{resolved.micro_batch_size} x {resolved.num_microbatches} x "
        f"{program.mesh.size('dp')} = {resolved.global_batch_size}",
        *planned,
        report.passes_table(program),
        "memory of one rank at each pipeline coordinate when it holds the most",
        report.memory_table(
            program, plan_optimizer(resolved.plan), has_host=has_host(resolved.plan)
        ),
        "traffic of one rank of each stage in one step",
        report.traffic_table(program) or "none",
        *_choices(compiled),
        report.schedule_text(program),
    ]
    if args.remarks:
        sections.append("\n".join(map(str, compiled.remarks)))
    return "\n\n".join(sections)


def _choices(compiled: Compiled) -> list[str]:
    """Return the tables of settings that trade one cost for another, where they apply."""
    from autoshard.cost import choices

    program, sections = compiled.program, []
    boundaries = choices.boundary_table(program)
    if boundaries:
        sections += ["stage boundaries, bytes per micro-batch and rank", boundaries]
    if compiled.resolved.plan.zero.stage == 3 and program.training:
        gathers = choices.gather_table(program)
        head = (
            "zero 3, bytes of one rank of each stage in one step: gathered once, or in every phase"
        )
        sections += [head, gathers] if gathers else []
    return sections


def plan_optimizer(plan: Plan) -> str:
    """Return the optimizer the report assumes."""
    return plan.assume.optimizer or "adamw"


def has_host(plan: Plan) -> bool:
    """Tell whether the report assumes a device whose memory is not the host's."""
    return plan.assume.device != "cpu"


def _as_json(compiled: Compiled) -> str:
    from dataclasses import asdict

    from autoshard.cost.choices import boundary_choices, gather_choices
    from autoshard.cost.replay import peaks
    from autoshard.cost.traffic import traffic

    program, is_zero_3 = compiled.program, compiled.resolved.plan.zero.stage == 3
    plan = compiled.resolved.plan
    found_peaks = peaks(program, plan_optimizer(plan), has_host=has_host(plan))
    memory = [asdict(p) | {"total": p.total, "place": p.place} for p in found_peaks]
    found = {
        "passes": [asdict(entry) for entry in program.journal],
        "memory": memory,
        "traffic": [asdict(row) for row in traffic(program)],
        "boundaries": [asdict(row) for row in boundary_choices(program)],
        "gathers": [asdict(row) for row in gather_choices(program)] if is_zero_3 else [],
        "schedule": str(program.schedule).splitlines(),
    }
    return json.dumps(found, indent=2)


def _pass_text(args: argparse.Namespace, plan: Plan, after: Compiled) -> str:
    from autoshard.ir.printer import print_function, used_axes

    if not args.diff:
        axes = used_axes(after.program)
        texts = [
            f"{name}\n{print_function(function, fold=not args.full, axes=axes)}"
            for name, function in _chosen(args, after.program)
        ]
        return "\n\n".join([*texts, *_schedule_of(after.program)])
    return _diff_text(args, plan, after)


def _diff_text(args: argparse.Namespace, plan: Plan, after: Compiled) -> str:
    """Print what the pass, or all passes of the group, changed against the one before."""
    from autoshard.ir.diff import diff_blocks, render
    from autoshard.ir.printer import function_lines, used_axes
    from autoshard.passes.pipelines import default_pipeline

    steps = default_pipeline().until(args.until).passes
    first = next(i for i, step in enumerate(steps) if args.until in (step.name, step.group))
    if first == 0:
        return "the first pass has nothing before it to differ from"
    before = _compile(args, plan, steps[first - 1].name)
    texts, axes = [], used_axes(after.program)
    for (_, old), (name, new) in zip(
        _chosen(args, before.program), _chosen(args, after.program), strict=False
    ):
        diffs = diff_blocks(function_lines(old, axes), function_lines(new, axes))
        texts.append(f"{name}\n{render(diffs)}")
    return "\n\n".join(texts)


def _chosen(args: argparse.Namespace, program: Program) -> list[tuple[str, GraphFunction]]:
    """Return the graphs that --stage and --phase leave, with their names."""
    named = [(n, f) for n, f in program.functions() if n != "prelude"]
    chosen = named
    if program.stages:
        chosen = [(n, f) for n, f in chosen if n.startswith(f"stage{args.stage or 0}.")]
    if args.phase:
        chosen = [(n, f) for n, f in chosen if n.endswith(f".{args.phase}")]
    if named and not chosen:
        raise ModelError(
            "no graph is left by `--stage` and `--phase` after this pass",
            help=f"there are: {', '.join(name for name, _ in named)}",
        )
    return chosen


def _schedule_of(program: Program) -> list[str]:
    return [str(program.schedule)] if program.schedule is not None else []
