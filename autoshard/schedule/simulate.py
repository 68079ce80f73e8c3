"""Simulate a schedule: times, both bubbles, activations in flight, the critical path.

Two bubbles, always named. The *step* bubble is the idle share from the start of the step to the
end of its last rank: what counts when the optimizer, or the norm for clipping, waits for all
stages. The *span* bubble takes the longest time from a rank's own first action to its last: what
counts when each rank may begin the next step early.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from autoshard.schedule.action import Action, Kind
from autoshard.schedule.costs import UNIT, Costs, Number
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.timeline import Timed, needs, produces, run_clock


@dataclass(frozen=True)
class Simulation:
    """Hold when each rank does what; everything else is computed from that.

    Bubbles are shares from 0 to 1, as exact fractions where the costs are exact. Activations are
    counted in (stage, micro-batch) pairs: with v stages on a rank, v pairs are one micro-batch.
    """

    schedule: Schedule
    costs: Costs
    ranks: tuple[tuple[Timed, ...], ...]

    @property
    def step_time(self) -> Number:
        """Return the time from the start of the step to the end of the last action."""
        return max((timed.end for row in self.ranks for timed in row), default=0)

    @property
    def spans(self) -> tuple[Number, ...]:
        """Return each rank's time from its own first action to its last."""
        return tuple(row[-1].end - row[0].start if row else 0 for row in self.ranks)

    @property
    def busy(self) -> tuple[Number, ...]:
        """Return the time each rank computes."""
        return tuple(sum(timed.end - timed.start for timed in row) for row in self.ranks)

    @property
    def step_bubble(self) -> Number:
        """Return the mean idle share of the ranks over the whole step."""
        return self._idle_share(self.step_time)

    @property
    def span_bubble(self) -> Number:
        """Return the mean idle share of the ranks over the longest span of a rank."""
        return self._idle_share(max(self.spans))

    def peak_in_flight(self, kept: Number = 1) -> tuple[Number, ...]:
        """Return the most activations each rank holds at once.

        A forward adds one, its input gradient releases all of it but the share `kept`, its weight
        gradient the rest: 1 counts from F to W (or B), 0 from F to the input gradient.
        """
        return tuple(_peak(row, kept) for row in self.ranks)

    def critical_path(self) -> tuple[Timed, ...]:
        """Return a chain of actions, each waiting for the one before, that ends the step last."""
        made = {key: timed for row in self.ranks for timed in row for key in _keys(timed.action)}
        before = {row[i].action: row[i - 1] for row in self.ranks for i in range(1, len(row))}
        last = max((row[-1] for row in self.ranks if row), key=lambda timed: timed.end)
        path = [last]
        while path[-1].start > 0:
            action = path[-1].action
            inputs = [(made[key], b) for key, b in needs(self.schedule, action) if key in made]
            arrivals = [(t.end + self._delay(boundary), t) for t, boundary in inputs]
            if action in before:
                arrivals.append((before[action].end, before[action]))
            path.append(max(arrivals, key=lambda pair: pair[0])[1])
        return tuple(reversed(path))

    def _delay(self, boundary: int | None) -> Number:
        return 0 if boundary is None else self.costs.transfer(boundary)

    def _idle_share(self, period: Number) -> Number:
        work, available = sum(self.busy), period * self.schedule.num_ranks
        if not available:
            return 0
        share = 1 - _exact(work) / available
        return share if isinstance(share, Fraction) else max(0.0, share)


def simulate(schedule: Schedule, costs: Costs = UNIT) -> Simulation:
    """Run the compute actions of a schedule, lowered or not, on a clock.

    Transfers take `costs.send` from the end of one action to the earliest start of the next and
    hold up no rank; gathers and reductions of parameters take no time here.
    """
    return Simulation(schedule, costs, run_clock(schedule, costs))


def _exact(value: Number) -> Number:
    return Fraction(value) if isinstance(value, int) else value


def _keys(action: Action) -> Iterator[tuple[str, int, int]]:
    assert action.microbatch is not None
    for word in produces(action):
        yield word, action.stage, action.microbatch


def _peak(row: tuple[Timed, ...], kept: Number) -> Number:
    change = {Kind.F: 1, Kind.B: -1, Kind.I: kept - 1, Kind.W: -kept}
    held: Number = 0
    peak: Number = 0
    for timed in row:
        held += change[timed.action.kind]
        peak = max(peak, held)
    return peak
