"""Break schedules and rank programs in one place each, and count what the checks find.

    python -m autoshard.testing.schedule_mutants [--count N] [--seed S] [--json]

A mutant has one action (or event) of one rank dropped, swapped with another, given another kind,
another target, or another size. It counts as equivalent only when an oracle that shares no code
with the checks runs it to the same outcome: most often a swap of two actions that don't depend on
each other. Anything else must be caught. The good programs around it must raise no alarm.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autoshard.diagnostics import ScheduleError
from autoshard.mesh import Mesh
from autoshard.schedule import (
    SCHEDULES,
    Action,
    Event,
    Inside,
    Kind,
    Schedule,
    find_problems,
    lower_schedule,
    make_schedule,
    prove_order,
    spell_out,
)
from autoshard.schedule.action import COMPUTE, RECVS, SENDS, STORAGE
from autoshard.schedule.lower import ReducePer, Unshard
from autoshard.testing.event_machine import run_events
from autoshard.testing.schedule_machine import run_symbols

OUTCOMES = ("caught", "equivalent", "missed", "false alarm")
DEFAULT_COUNT = 600


@dataclass(frozen=True)
class Base:
    """A good lowered schedule and how it was lowered."""

    schedule: Schedule
    reduce_per: ReducePer
    unshard: Unshard

    def alarm(self, schedule: Schedule) -> str:
        """Return what the checks say against a schedule that was lowered like this; "" if good."""
        problems = find_problems(schedule, reduce_per=self.reduce_per, unshard=self.unshard)
        if problems:
            return problems[0]
        try:
            programs = spell_out(schedule)
        except ScheduleError as error:
            return str(error)
        verdicts = (prove_order(programs, semantics) for semantics in ("rendezvous", "streams"))
        return next((verdict.message for verdict in verdicts if not verdict.ok), "")


@dataclass
class Report:
    """Count outcomes by operator; keep the misses and false alarms to show."""

    counts: Counter[tuple[str, str]]
    odd: list[str]

    def add(self, operator: str, outcome: str, what: str) -> None:
        """Count one mutant or good program."""
        self.counts[operator, outcome] += 1
        if outcome in ("missed", "false alarm"):
            self.odd.append(f"{operator}, {outcome}: {what}")

    def total(self, outcome: str) -> int:
        """Return how often an outcome came, over all operators."""
        return sum(number for (_, one), number in self.counts.items() if one == outcome)


def bases(rng: random.Random) -> Iterator[Base]:
    """Yield good lowered schedules of every kind, sizes at random, without end."""
    while True:
        for name in SCHEDULES:
            made = make_schedule(
                name, num_ranks=rng.randint(2, 4), num_microbatches=rng.randint(1, 7)
            )
            reduce_per: ReducePer = rng.choice(("step", "microbatch"))
            unshard: Unshard = rng.choice(("never", "step", "microbatch"))
            lowered = lower_schedule(made, reduce_per=reduce_per, unshard=unshard)
            yield Base(lowered, reduce_per, unshard)


def drop(rng: random.Random, row: list[Action], place: int, schedule: Schedule) -> None:
    """Leave the action out."""
    del row[place]


def swap_neighbours(rng: random.Random, row: list[Action], place: int, schedule: Schedule) -> None:
    """Do the action after the one that follows it."""
    other = place + 1 if place + 1 < len(row) else place - 1
    row[place], row[other] = row[other], row[place]


def swap(rng: random.Random, row: list[Action], place: int, schedule: Schedule) -> None:
    """Exchange the action with any other of the rank."""
    other = rng.choice([one for one in range(len(row)) if one != place])
    row[place], row[other] = row[other], row[place]


def retype(rng: random.Random, row: list[Action], place: int, schedule: Schedule) -> None:
    """Give the action another kind of its family."""
    action = row[place]
    families = (COMPUTE, SENDS | RECVS, STORAGE)
    family = next(one for one in families if action.kind in one)
    kinds = sorted(family - {action.kind}, key=lambda kind: kind.value)
    row[place] = replace(action, kind=rng.choice(kinds))


def retarget(rng: random.Random, row: list[Action], place: int, schedule: Schedule) -> None:
    """Give the action another micro-batch or another stage."""
    action = row[place]
    number = action.microbatch
    if number is not None and schedule.num_microbatches > 1 and rng.random() < 0.5:
        others = [one for one in range(schedule.num_microbatches) if one != number]
        row[place] = replace(action, microbatch=rng.choice(others))
    else:
        others = [one for one in range(schedule.num_stages) if one != action.stage]
        row[place] = replace(action, stage=rng.choice(others))


SCHEDULE_OPERATORS: dict[str, Callable[[random.Random, list[Action], int, Schedule], None]] = {
    "drop": drop,
    "swap neighbours": swap_neighbours,
    "swap": swap,
    "retype": retype,
    "retarget": retarget,
}


def mutate_schedules(rng: random.Random, count: int, report: Report) -> None:
    """Plant `count` faults in actions, operators in turn."""
    source = bases(rng)
    for number in range(count):
        base = next(source)
        operator = list(SCHEDULE_OPERATORS)[number % len(SCHEDULE_OPERATORS)]
        rank = rng.randrange(base.schedule.num_ranks)
        row = list(base.schedule.ranks[rank])
        SCHEDULE_OPERATORS[operator](rng, row, rng.randrange(len(row)), base.schedule)
        rows = list(base.schedule.ranks)
        rows[rank] = tuple(row)
        mutant = replace(base.schedule, ranks=tuple(rows))
        outcome = _judge(base, mutant)
        report.add(f"action: {operator}", outcome, f"rank {rank} of\n{base.schedule}\n{mutant}")


def _judge(base: Base, mutant: Schedule) -> str:
    is_sharded = base.unshard == "step"
    expected = run_symbols(base.schedule, is_sharded=is_sharded)
    is_harmless = run_symbols(mutant, is_sharded=is_sharded) == expected
    is_caught = bool(base.alarm(mutant))
    if is_harmless:
        return "false alarm" if is_caught else "equivalent"
    return "caught" if is_caught else "missed"


def good_rank_programs(rng: random.Random) -> list[list[Event]]:
    """Return what eight ranks (pp 2, dp 2, tp 2) do, with collectives inside the graphs."""
    base = next(bases(rng))
    made = make_schedule(
        rng.choice(list(SCHEDULES)), num_ranks=2, num_microbatches=rng.randint(1, 4)
    )
    lowered = lower_schedule(made, reduce_per=base.reduce_per, unshard=base.unshard)
    inside: dict[tuple[Kind, int], list[Inside]] = {}
    for stage in range(made.num_stages):
        layer = [Inside("dp", "all_gather f32[64]"), Inside("tp", "all_reduce f32[4, 8]")]
        inside[Kind.F, stage] = layer * 2
        inside[Kind.I, stage] = [*layer, Inside("dp", "reduce_scatter f32[64]")]
        inside[Kind.UNSHARD, stage] = [Inside("dp", "all_gather f32[512]")]
        inside[Kind.REDUCE_GRAD, stage] = [Inside("dp", "reduce_scatter f32[512]")]
    return spell_out(lowered, Mesh.of(pp=2, dp=2, tp=2), inside)


EVENT_OPERATORS = ("drop", "swap", "retype", "resize")


def mutate_events(rng: random.Random, count: int, report: Report) -> None:
    """Plant `count` faults in collectives and transfers of one rank, operators in turn."""
    for number in range(count):
        programs = good_rank_programs(rng)
        operator = EVENT_OPERATORS[number % len(EVENT_OPERATORS)]
        rank = rng.randrange(len(programs))
        before = list(programs[rank])
        _break_event(rng, programs[rank], operator)
        is_harmless = not run_events(programs)
        is_caught = not prove_order(programs).ok
        outcome = {
            (True, True): "false alarm",
            (True, False): "equivalent",
            (False, True): "caught",
            (False, False): "missed",
        }[is_harmless, is_caught]
        report.add(f"collective or transfer: {operator}", outcome, f"rank {rank}: {before}")


def _break_event(rng: random.Random, program: list[Event], operator: str) -> None:
    places = [i for i, event in enumerate(program) if event.kind not in ("compute", "wait")]
    place = rng.choice(places)
    event = program[place]
    if operator == "drop":
        del program[place]
    elif operator == "swap":
        other = rng.choice([one for one in places if program[one] != event] or places)
        program[place], program[other] = program[other], event
    elif operator == "resize":
        program[place] = event._replace(tag=f"{event.tag} x 2")
    else:
        program[place] = event._replace(tag=f"other {event.tag}")


def check_good(rng: random.Random, count: int, report: Report) -> None:
    """Check `count` good programs: schedules, and every fourth one spelled out on a mesh."""
    source = bases(rng)
    for number in range(count):
        base = next(source)
        alarm = base.alarm(base.schedule)
        if number % 4 == 0 and not alarm:
            programs = good_rank_programs(rng)
            alarm = prove_order(programs).message or prove_order(programs, "streams").message
        report.add("good program", "false alarm" if alarm else "good", alarm)


def run(count: int, seed: int) -> Report:
    """Return the report over `count` schedule mutants, as many event mutants and good programs."""
    report = Report(Counter(), [])
    mutate_schedules(random.Random(seed), count, report)
    mutate_events(random.Random(seed + 1), count, report)
    check_good(random.Random(seed + 2), count, report)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and the rate; return 1 where something was missed or raised for nothing."""
    parser = argparse.ArgumentParser(prog="python -m autoshard.testing.schedule_mutants")
    parser.add_argument("--count", type=int, default=DEFAULT_COUNT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    report = run(args.count, args.seed)
    print(json.dumps(_facts(report)) if args.json else _text(report))
    return 1 if report.odd else 0


def _facts(report: Report) -> dict[str, object]:
    caught, missed = report.total("caught"), report.total("missed")
    return {
        "faults": caught + missed,
        "caught": caught,
        "rate": caught / max(1, caught + missed),
        "equivalent": report.total("equivalent"),
        "good": report.total("good"),
        "false_alarms": report.total("false alarm"),
    }


def _text(report: Report) -> str:
    width = max(len(operator) for operator, _ in report.counts)
    lines = [f"{'':{width}}  " + "  ".join(f"{outcome:>11}" for outcome in OUTCOMES)]
    for operator in dict.fromkeys(operator for operator, _ in report.counts):
        if operator != "good program":
            row = "  ".join(f"{report.counts[operator, outcome]:>11}" for outcome in OUTCOMES)
            lines.append(f"{operator:{width}}  {row}")
    facts = _facts(report)
    lines += [
        f"{facts['caught']} of {facts['faults']} faults caught ({facts['rate']:.1%}); "
        f"{facts['equivalent']} mutants run to the same outcome and are no faults",
        f"{facts['good']} good programs without an alarm, {facts['false_alarms']} false alarms",
        *report.odd,
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
