"""Check a schedule alone, also one made by another system: rules, order, deadlock."""

from dataclasses import dataclass

from autoshard.schedule.event import Semantics
from autoshard.schedule.lower import lower_schedule
from autoshard.schedule.order import OrderVerdict, prove_order
from autoshard.schedule.programs import spell_out
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.validate import find_problems

SEMANTICS: tuple[Semantics, ...] = ("rendezvous", "streams")
BY_ITSELF, TOGETHER = "each transfer posted by itself", "neighbouring transfers posted together"


@dataclass(frozen=True)
class ScheduleCheck:
    """Hold what was found: broken rules, or a verdict of order per way of posting transfers."""

    schedule: Schedule
    has_own_transfers: bool
    problems: tuple[str, ...]
    verdicts: tuple[tuple[str, OrderVerdict], ...]
    reorders_gradients: bool  # weight gradients of a stage aren't in micro-batch order

    @property
    def is_good(self) -> bool:
        """Tell whether the rules hold and a run exists however its transfers are posted."""
        return not self.problems and all(verdict.ok for _, verdict in self.verdicts)

    def to_json(self) -> dict[str, object]:
        """Return the findings as plain data."""
        orders = [
            {"posted": posted, "semantics": verdict.semantics, "free": verdict.ok}
            for posted, verdict in self.verdicts
        ]
        sizes = {"ranks": self.schedule.num_ranks, "stages": self.schedule.num_stages}
        found = {"problems": list(self.problems), "deadlock": orders}
        return {"good": self.is_good, "schedule": self.schedule.name, **sizes, **found}

    def __str__(self) -> str:
        """Return the findings, one a line."""
        schedule = self.schedule
        lines = [
            f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
            f"{schedule.num_microbatches} microbatches"
        ]
        if self.problems:
            return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])
        if not self.has_own_transfers:
            lines.append("  note: it has no transfers; those that our lowering adds are checked")
        if self.reorders_gradients:
            lines.append("  note: weight gradients accumulate out of micro-batch order")
        lines += [f"  {posted}: {verdict}" for posted, verdict in self.verdicts]
        if not self.is_good and all(v.ok for posted, v in self.verdicts if posted == TOGETHER):
            lines.append(f"  note: it runs only with {TOGETHER}")
        return "\n".join(lines)


def check_schedule(schedule: Schedule) -> ScheduleCheck:
    """Return whether a schedule is complete, in order and free of deadlock, and what is wrong."""
    own = schedule.is_lowered()
    problems = find_problems(schedule, accumulation="any")
    if problems:
        return ScheduleCheck(schedule, own, problems, (), False)
    lowered = schedule
    if not own:
        lowered = lower_schedule(schedule, reduce_per="microbatch", unshard="never")
    verdicts = tuple(
        (posted, prove_order(spell_out(lowered, is_batched=posted == TOGETHER), semantics))
        for posted in (BY_ITSELF, TOGETHER)
        for semantics in SEMANTICS
    )
    return ScheduleCheck(schedule, own, (), verdicts, bool(find_problems(schedule)))
