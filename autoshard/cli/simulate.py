"""`autoshard simulate`: the grid, the bubbles and the memory of a pipeline schedule."""

import argparse
import json
from pathlib import Path

from autoshard.cli.common import add_common
from autoshard.diagnostics import AutoshardError, ScheduleError
from autoshard.schedule import SCHEDULES, Costs, Schedule, make_schedule, validate_schedule
from autoshard.schedule.costs import Number, parse_costs
from autoshard.schedule.read import read_schedule
from autoshard.schedule.render import chrome_trace, render_grid
from autoshard.schedule.simulate import Simulation, simulate

ALL = "all"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command."""
    text = "print the grid, bubbles and memory of a pipeline schedule"
    parser = add_common(subparsers.add_parser("simulate", help=text, description=text))
    names = f"{', '.join(SCHEDULES)}; all; or FILE.csv in torch's form"
    parser.add_argument("--schedule", metavar="NAME", required=True, help=names)
    parser.add_argument("--stages", type=int, metavar="P", help="number of pipeline ranks")
    parser.add_argument("--microbatches", type=int, metavar="M")
    parser.add_argument("--virtual", type=int, metavar="V", help="stages a rank holds")
    parser.add_argument(
        "--in-flight", type=int, metavar="N", help="most micro-batches a rank holds"
    )
    parser.add_argument("--cost", metavar="F,I,W,SEND", help="times per stage (default 1,1,1,0)")
    parser.add_argument(
        "--kept", metavar="SHARE", help="of an activation, between I and W (default 1)"
    )
    parser.add_argument("--csv", metavar="FILE", help="write the schedule in torch's CSV form")
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace (Perfetto opens it)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate, print, and write the files asked for."""
    costs = parse_costs(args.cost or "1,1,1,0", args.kept or "1")
    if args.schedule == ALL:
        return _compare(args, costs)
    schedule = _schedule(args, costs)
    simulation = simulate(schedule, costs)
    if args.csv:
        _write(args.csv, schedule.to_csv())
    if args.trace:
        _write(args.trace, json.dumps(chrome_trace(simulation)))
    print(json.dumps(_facts(simulation)) if args.json else _text(simulation))
    return 0


def _schedule(args: argparse.Namespace, costs: Costs) -> Schedule:
    if args.schedule.endswith(".csv"):
        _refuse_beside_file(args)
        schedule = read_schedule(Path(args.schedule))
        validate_schedule(schedule, accumulation="any")
        return schedule
    return _make(args.schedule, args, costs)


def _make(name: str, args: argparse.Namespace, costs: Costs) -> Schedule:
    if name in SCHEDULES and None in (args.stages, args.microbatches):
        raise ScheduleError(
            f"{args.schedule} needs its numbers",
            help="add --stages P (pipeline ranks) and --microbatches M",
        )
    return make_schedule(
        name,
        num_ranks=args.stages,
        num_microbatches=args.microbatches,
        virtual_stages=args.virtual,
        max_in_flight=args.in_flight,
        costs=costs,
    )


def _compare(args: argparse.Namespace, costs: Costs) -> int:
    """Print every schedule of one model: with v stages a rank, each stage has 1/v of the layers."""
    for option in ("virtual", "in_flight", "csv", "trace"):
        if getattr(args, option) is not None:
            word = f"--{option.replace('_', '-')}"
            raise ScheduleError(f"{word} needs one schedule, not '{ALL}'")
    simulations = []
    for name in SCHEDULES:
        virtual = SCHEDULES[name].virtual_stages[0] or 1
        share = costs.divided(virtual)
        simulations.append(simulate(_make(name, args, share), share))
    if args.json:
        print(json.dumps([_facts(simulation) for simulation in simulations]))
        return 0
    print(f"{'schedule':18}{'stages a rank':>14}{'step bubble':>13}{'span bubble':>13}{'held':>7}")
    for simulation in simulations:
        schedule = simulation.schedule
        held = float(max(simulation.peak_in_flight(costs.kept)) / schedule.virtual_stages)
        print(
            f"{schedule.name:18}{schedule.virtual_stages:>14}"
            f"{float(simulation.step_bubble):>13.1%}{float(simulation.span_bubble):>13.1%}{held:>7g}"
        )
    print("held: most activations on a rank, in micro-batches of all its stages")
    return 0


def _refuse_beside_file(args: argparse.Namespace) -> None:
    options = ("stages", "microbatches", "virtual", "in_flight")
    given = [f"--{word.replace('_', '-')}" for word in options if getattr(args, word) is not None]
    if given:
        raise ScheduleError(f"{given[0]} can't change a schedule that is read from a file")


def _facts(simulation: Simulation) -> dict[str, object]:
    schedule, costs = simulation.schedule, simulation.costs
    return {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "virtual_stages": schedule.virtual_stages,
        "microbatches": schedule.num_microbatches,
        "cost": {word: float(getattr(costs, word)) for word in ("F", "I", "W", "send")},
        "step_bubble": float(simulation.step_bubble),
        "span_bubble": float(simulation.span_bubble),
        "step_time": float(simulation.step_time),
        "peak_activations": list(simulation.peak_in_flight()),
        "peak_activations_to_input_gradient": list(simulation.peak_in_flight(kept=0)),
        "critical_path": [str(timed.action) for timed in simulation.critical_path()],
    }


def _text(simulation: Simulation) -> str:
    schedule, costs = simulation.schedule, simulation.costs
    stages = f"{schedule.virtual_stages} stage{'s' if schedule.virtual_stages > 1 else ''}"
    return "\n".join(
        [
            f"{schedule.name}: {schedule.num_ranks} ranks x {stages}, "
            f"{schedule.num_microbatches} micro-batches, "
            f"costs F {costs.F}, I {costs.I}, W {costs.W}, send {costs.send}",
            f"  step bubble  {float(simulation.step_bubble):6.1%}   idle share of a step that "
            "ends on all ranks at once",
            f"  span bubble  {float(simulation.span_bubble):6.1%}   idle share from a rank's own "
            "first to last action",
            f"  activations in flight, most per rank: {_numbers(simulation.peak_in_flight())}",
            f"    counted to the input gradient only:  "
            f"{_numbers(simulation.peak_in_flight(kept=0))}",
            "",
            render_grid(simulation),
        ]
    )


def _numbers(values: tuple[Number, ...]) -> str:
    return " ".join(str(value) for value in values)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise AutoshardError(f"can't write '{path}': {error.strerror}") from error
