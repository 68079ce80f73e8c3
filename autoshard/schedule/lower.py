"""Lower a schedule: add transfers, parameter gathers and gradient reductions to its actions.

One lowering serves all schedules. Deadlock freedom is by construction: all compute actions and
all transfers get places in *one* order of time, and each rank's program is its share of it. A run
that follows that order exists when every send waits for its receive (rendezvous, no buffering),
so also when transfers are queued on ordered streams, in batches or one by one.
"""

from collections.abc import Collection, Iterator
from typing import Literal

from autoshard.diagnostics import ScheduleError
from autoshard.schedule.action import COMPUTE, Action, Kind
from autoshard.schedule.costs import UNIT, Costs, Number
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.timeline import Timed, run_clock

ReducePer = Literal["step", "microbatch"]
Unshard = Literal["never", "step", "microbatch"]

# A place in the one order: time, transfers (0) before compute (1), then a fixed tie-break.
_Place = tuple[Number, int, int, int]


def lower_schedule(
    schedule: Schedule,
    *,
    reduce_per: ReducePer,
    unshard: Unshard,
    costs: Costs = UNIT,
    reduce_last: Collection[int] = (),
) -> Schedule:
    """Return the schedule with SEND/RECV, and storage actions as the two options say.

    `reduce_per="step"` adds one REDUCE_GRAD per stage after its last weight gradient, for the
    stages of `reduce_last` after all else the rank does: they wait for other ranks, whose last
    weight gradients may still need this rank's other stages.
    `unshard="step"` adds UNSHARD before a stage's first use (one compute action ahead, so that
    the gather can overlap) and RESHARD after its last compute action.
    With "microbatch" gathers and reductions live inside the graphs, so nothing is added; "never"
    means that parameters are whole. `costs` place the transfers among the compute actions, so
    times near the real ones keep a queue of transfers from blocking at its head; F, I and W
    must be above 0.
    """
    if schedule.is_lowered():
        raise ScheduleError(f"schedule {schedule.name} has transfers already: lower it only once")
    if reduce_per not in ("step", "microbatch") or unshard not in ("never", "step", "microbatch"):
        raise ScheduleError(f"can't lower with reduce_per='{reduce_per}', unshard='{unshard}'")
    rows = _with_transfers(schedule, costs)
    if unshard == "step":
        rows = [_with_unshard(row) for row in rows]
    if reduce_per == "step":
        rows = [_with_reduce(row, reduce_last) for row in rows]
    ranks = tuple(tuple(row) for row in rows)
    return Schedule(
        schedule.name,
        schedule.num_stages,
        schedule.num_microbatches,
        schedule.stage_to_rank,
        ranks,
    )


def _with_transfers(schedule: Schedule, costs: Costs) -> list[list[Action]]:
    placed: list[list[tuple[_Place, Action]]] = [[] for _ in schedule.ranks]
    for timed in (t for row in run_clock(schedule, costs) for t in row):
        if timed.end <= timed.start:
            raise ScheduleError(f"can't place transfers: {timed.action} takes no time in the costs")
        placed[timed.rank].append(((timed.start, 1, 0, 0), timed.action))
        for place, send in _transfers(schedule, timed):
            peer = schedule.stage_to_rank[send.peer_stage]
            placed[timed.rank].append((place, send))
            placed[peer].append((place, send.partner))
    return [[action for _, action in sorted(row, key=lambda pair: pair[0])] for row in placed]


def _transfers(schedule: Schedule, timed: Timed) -> Iterator[tuple[_Place, Action]]:
    """Yield the send of a compute action's result, if another rank reads it."""
    stage, number = timed.action.stage, timed.action.microbatch
    kind = {Kind.F: Kind.SEND_F, Kind.I: Kind.SEND_B, Kind.B: Kind.SEND_B}.get(timed.action.kind)
    if kind is None:
        return
    send = Action(kind, stage, number)
    inside = 0 <= send.peer_stage < schedule.num_stages
    if inside and schedule.stage_to_rank[send.peer_stage] != timed.rank:
        assert number is not None
        yield (timed.end, 0, stage, number), send


def _with_unshard(row: list[Action]) -> list[Action]:
    reads = COMPUTE  # W too: where no stage comes before, all of the backward may be W
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, action in enumerate(row):
        if action.kind in reads:
            first.setdefault(action.stage, _one_compute_ahead(row, index))
            last[action.stage] = _after_sends(row, index)
    inserts = [(place, 1, Action(Kind.UNSHARD, stage)) for stage, place in first.items()]
    inserts += [(place, 0, Action(Kind.RESHARD, stage)) for stage, place in last.items()]
    return _insert(row, inserts)


def _with_reduce(row: list[Action], reduce_last: Collection[int]) -> list[Action]:
    last = {a.stage: i for i, a in enumerate(row) if a.kind in (Kind.W, Kind.B)}
    early = [stage for stage in last if stage not in reduce_last]
    inserts = [(_after_sends(row, last[s]), 0, Action(Kind.REDUCE_GRAD, s)) for s in early]
    late = [Action(Kind.REDUCE_GRAD, s) for s in sorted(last) if s in reduce_last]
    return _insert(row, inserts) + late


def _one_compute_ahead(row: list[Action], index: int) -> int:
    """Return the place of the compute action before `index`, or of the start of the row."""
    earlier = (i for i in range(index - 1, -1, -1) if row[i].kind in COMPUTE)
    return next(earlier, 0)


def _after_sends(row: list[Action], index: int) -> int:
    """Return the place after `index` and the sends of its result: peers wait for those."""
    index += 1
    while index < len(row) and row[index].kind in (Kind.SEND_F, Kind.SEND_B, Kind.RESHARD):
        index += 1
    return index


def _insert(row: list[Action], inserts: list[tuple[int, int, Action]]) -> list[Action]:
    """Return the row with each action put before its place; at one place, lower orders first."""
    result = list(row)
    for place, _, action in sorted(inserts, key=lambda item: item[:2], reverse=True):
        result.insert(place, action)
    return result
