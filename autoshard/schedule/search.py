"""Search for a schedule with a split backward under a memory bound: list scheduling on a clock.

In the order of time each rank that is free takes the best action it can begin: an input gradient
before a forward (in turns, so that both directions flow), a forward only where memory allows, a
weight gradient where nothing else could begin for a while. Two thresholds steer the "for a while";
all their settings are tried and the best step is kept. This is a heuristic of the kind that Qi et
al. 2023 use for ZB-1p and ZB-2p; no setting is claimed to be optimal.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from autoshard.schedule.action import Action, Kind
from autoshard.schedule.costs import Costs, Number
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.simulate import simulate

_NEVER = math.inf


@dataclass(frozen=True)
class Problem:
    """Say what to schedule: stages on ranks, micro-batches, costs, and the memory bound.

    A rank may hold `limit` activations of a stage at once, counted with `costs.kept`. Whole costs
    (`Costs.whole`) are faster and make ties ties.
    """

    placement: tuple[int, ...]
    num_microbatches: int
    costs: Costs
    limit: int


@dataclass(frozen=True)
class Policy:
    """Steer the choices; both are shares of the time of the action they hold back."""

    fill: float  # do W only if the next input is at least this share of W away
    hold: float  # don't begin F if I's input comes within this share of F


POLICIES = tuple(Policy(fill, hold) for fill, hold in product((0, 0.25, 0.5, 1), (0, 0.5, 1)))

Rows = list[list[Action]]


def candidates(problem: Problem) -> Iterator[Rows]:
    """Yield the schedule of each policy that fits the memory bound."""
    for policy in POLICIES:
        rows = _Clock(problem, policy).run()
        if rows is not None:
            yield rows


def best(problem: Problem, choices: Iterable[Rows]) -> Rows | None:
    """Return the choice that fits the memory bound and has the shortest step and span together.

    Stop at one that no schedule can beat: the last rank to begin never waits, nor does any other.
    """
    fastest, goal = None, _goal(problem)
    best_time: Number = math.inf
    for rows in choices:
        simulation = simulate(_schedule(problem, rows), problem.costs)
        time = simulation.step_time + max(simulation.spans)
        fits = max(simulation.peak_in_flight(problem.costs.kept)) <= problem.limit
        if fits and time < best_time:
            fastest, best_time = rows, time
        if best_time <= goal:
            break
    return fastest


def _goal(problem: Problem) -> Number:
    """Return what step time and longest span add up to when no rank ever waits for another."""
    costs, placement = problem.costs, problem.placement
    busy: list[Number] = [0] * (max(placement) + 1)
    begin: list[Number] = []
    at: Number = 0
    for stage, rank in enumerate(placement):
        work = sum(costs.of(Action(kind, stage, 0)) for kind in (Kind.F, Kind.I, Kind.W))
        busy[rank] += problem.num_microbatches * work
        if len(begin) == rank:
            begin.append(at)
        at += costs.of(Action(Kind.F, stage, 0))
        if stage + 1 < len(placement) and placement[stage + 1] != rank:
            at += costs.transfer(stage)
    return max(map(sum, zip(begin, busy, strict=True))) + max(busy)


def _schedule(problem: Problem, rows: Rows) -> Schedule:
    ranks = tuple(tuple(row) for row in rows)
    placement = problem.placement
    return Schedule("search", len(placement), problem.num_microbatches, placement, ranks)


class _Clock:
    """Run one policy."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        placement, count = problem.placement, problem.num_microbatches
        stages = range(len(placement))
        self.placement, self.count = placement, count
        self.limit, self.kept = problem.limit, problem.costs.kept
        kinds = (Kind.F, Kind.I, Kind.W)
        self.times = {k: [problem.costs.of(Action(k, s, 0)) for s in stages] for k in kinds}
        self.send = [problem.costs.transfer(s) for s in stages[:-1]]
        self.fill = [policy.fill * time for time in self.times[Kind.W]]
        self.hold = [policy.hold * time for time in self.times[Kind.F]]
        self.own = [[s for s in stages if placement[s] == r] for r in range(max(placement) + 1)]
        self.done: dict[Kind, list[int]] = {k: [0] * len(placement) for k in self.times}
        # When the input of each stage's next micro-batches arrives; never, until it is known.
        self.forward_at = [[_NEVER] * count for _ in stages]
        self.backward_at = [[_NEVER] * count for _ in stages]
        self.forward_at[0] = [0] * count
        self.held: list[Number] = [0] * len(self.own)
        self.rows: Rows = [[] for _ in self.own]
        self.free_at: list[float] = [0] * len(self.own)
        self.asleep = [False] * len(self.own)
        self.queue: list[tuple[float, int]] = [(0, rank) for rank in range(len(self.own))]

    def run(self) -> Rows | None:
        """Return the rows, or None where the memory bound leaves no rank anything to do."""
        while self.queue:
            now, rank = heapq.heappop(self.queue)
            self._step(max(now, self.free_at[rank]), rank)
        left = any(done < self.count for done in self.done[Kind.W])
        return None if left else self.rows

    def _step(self, now: float, rank: int) -> None:
        """Let a free rank begin an action, or sleep until an input arrives."""
        own = self.own[rank]
        backward = [(self._next(self.backward_at, Kind.I, s), s) for s in own]
        forward = [
            (self._next(self.forward_at, Kind.F, s), s)
            for place, s in enumerate(own)
            if self.held[rank] + len(own) - place <= self.limit  # leave room for later stages
        ]
        stage = self._ready(now, backward)
        next_backward = min((at for at, _ in backward if at > now), default=_NEVER)
        can_forward = self._ready(now, forward)
        if stage is not None and not (can_forward is not None and self._just_did_backward(rank)):
            self._begin(now, rank, Kind.I, stage)
        elif can_forward is not None and (
            stage is not None or next_backward - now >= self.hold[can_forward]
        ):
            self._begin(now, rank, Kind.F, can_forward)
        else:
            next_forward = min((at for at, _ in forward if at > now), default=_NEVER)
            self._fill(now, rank, min(next_backward, next_forward))

    def _next(self, arrivals: Sequence[Sequence[float]], kind: Kind, stage: int) -> float:
        number = self.done[kind][stage]
        return arrivals[stage][number] if number < self.count else _NEVER

    @staticmethod
    def _ready(now: float, arrivals: Sequence[tuple[float, int]]) -> int | None:
        """Return the last stage whose input is there: it is nearest to releasing memory."""
        return max((stage for at, stage in arrivals if at <= now), default=None)

    def _just_did_backward(self, rank: int) -> bool:
        return bool(self.rows[rank]) and self.rows[rank][-1].kind is Kind.I

    def _fill(self, now: float, rank: int, next_input: float) -> None:
        """Do a weight gradient while waiting, unless the wait is too short."""
        done = self.done
        late = [s for s in self.own[rank] if done[Kind.W][s] < done[Kind.I][s]]
        if late:
            stage = min(late, key=lambda s: (done[Kind.W][s], -s))
            if next_input - now >= self.fill[stage]:
                return self._begin(now, rank, Kind.W, stage)
        if next_input < _NEVER:
            heapq.heappush(self.queue, (next_input, rank))
        else:
            self.asleep[rank] = True
        return None

    def _begin(self, now: float, rank: int, kind: Kind, stage: int) -> None:
        number = self.done[kind][stage]
        self.done[kind][stage] += 1
        end = now + self.times[kind][stage]
        self.rows[rank].append(Action(kind, stage, number))
        self.held[rank] += {Kind.F: 1, Kind.I: self.kept - 1, Kind.W: -self.kept}[kind]
        self.free_at[rank] = end
        heapq.heappush(self.queue, (end, rank))
        if kind is Kind.F:
            self._forward_ends(now, end, stage, number)
        elif kind is Kind.I and stage > 0:
            self._arrive(now, self.backward_at, end, stage, stage - 1, number)

    def _forward_ends(self, now: float, end: float, stage: int, number: int) -> None:
        if stage + 1 < len(self.placement):
            self._arrive(now, self.forward_at, end, stage, stage + 1, number)
        else:
            self.backward_at[stage][number] = end

    def _arrive(
        self,
        now: float,
        arrivals: list[list[float]],
        end: float,
        source: int,
        target: int,
        number: int,
    ) -> None:
        rank = self.placement[target]
        crosses = self.placement[source] != rank
        arrivals[target][number] = end + (self.send[min(source, target)] if crosses else 0)
        if self.asleep[rank]:
            self.asleep[rank] = False
            heapq.heappush(self.queue, (now, rank))
