"""The invariant ``schedulable``, but for the order of ranks among each other (see order.py).

Each rule is one function from a schedule to sentences; a valid schedule yields none.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from autoshard.diagnostics import ScheduleError
from autoshard.schedule.action import COMPUTE, RECVS, SENDS, Action, Kind
from autoshard.schedule.lower import ReducePer, Unshard
from autoshard.schedule.schedule import Schedule

Accumulation = Literal["microbatch", "any"]

_READS_PARAMETERS = (Kind.F, Kind.I, Kind.B, Kind.W)
_WEIGHT_GRADIENT = (Kind.W, Kind.B)


def validate_schedule(
    schedule: Schedule,
    *,
    reduce_per: ReducePer | None = None,
    unshard: Unshard | None = None,
    accumulation: Accumulation = "microbatch",
    is_training: bool = True,
) -> None:
    """Raise ScheduleError with every problem that `find_problems` finds."""
    problems = find_problems(
        schedule,
        reduce_per=reduce_per,
        unshard=unshard,
        accumulation=accumulation,
        is_training=is_training,
    )
    if problems:
        shown = "\n  ".join(problems[:10])
        more = f"\n  ... and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ScheduleError(f"schedule {schedule.name} is invalid:\n  {shown}{more}")


def find_problems(
    schedule: Schedule,
    *,
    reduce_per: ReducePer | None = None,
    unshard: Unshard | None = None,
    accumulation: Accumulation = "microbatch",
    is_training: bool = True,
) -> tuple[str, ...]:
    """Return what breaks the rules of a schedule, each with the rank and the action.

    `reduce_per` and `unshard` say how it was lowered, so that each stage must have its storage
    actions, or none; None allows both. `accumulation="any"` also allows weight gradients out of
    micro-batch order. `is_training=False` is for schedules that have forwards only.
    """
    problems = list(_shape(schedule))
    if problems:
        return tuple(problems)  # the other rules index by stage and rank
    problems += _complete(schedule, is_training)
    for rank, row in enumerate(schedule.ranks):
        problems += _phases_in_order(rank, row)
        if accumulation == "microbatch":
            problems += _accumulates_in_order(rank, row)
        problems += _local_inputs_first(schedule, rank, row)
    if schedule.is_lowered() or reduce_per or unshard:
        problems += _transfers(schedule, is_training)
        problems += _storage(schedule, reduce_per, unshard)
    return tuple(problems)


def _shape(schedule: Schedule) -> Iterator[str]:
    if len(schedule.stage_to_rank) != schedule.num_stages:
        yield f"{schedule.num_stages} stages, but {len(schedule.stage_to_rank)} have a rank"
    for stage, rank in enumerate(schedule.stage_to_rank):
        if not 0 <= rank < schedule.num_ranks:
            yield f"stage {stage} is on rank {rank} of {schedule.num_ranks}"
    if schedule.num_microbatches < 1:
        yield f"{schedule.num_microbatches} micro-batches"
    for rank, _, action in schedule.positions():
        number = action.microbatch
        if not 0 <= action.stage < schedule.num_stages:
            yield f"rank {rank}: {action} names stage {action.stage} of {schedule.num_stages}"
        elif schedule.stage_to_rank[action.stage] != rank:
            holder = schedule.stage_to_rank[action.stage]
            yield f"rank {rank}: {action} belongs to rank {holder}, which holds the stage"
        elif number is not None and not 0 <= number < schedule.num_microbatches:
            yield f"rank {rank}: {action} names micro-batch {number} of {schedule.num_microbatches}"


def _complete(schedule: Schedule, is_training: bool) -> Iterator[str]:
    """Check that each (stage, micro-batch) has F once, and either B once or I and W once."""
    wanted = "B once or I and W once" if is_training else "no backward"
    allowed = ((1, 0, 0), (0, 1, 1)) if is_training else ((0, 0, 0),)
    counts = Counter(action for _, _, action in schedule.positions() if action.kind in COMPUTE)
    for stage in range(schedule.num_stages):
        for number in range(schedule.num_microbatches):
            f, b, i, w = (
                counts[Action(k, stage, number)] for k in (Kind.F, Kind.B, Kind.I, Kind.W)
            )
            if f != 1:
                yield f"stage {stage} has {stage}F{number} {f} times, not once"
            if (b, i, w) not in allowed:
                yield (
                    f"stage {stage}, micro-batch {number} needs {wanted}; "
                    f"it has B {b}, I {i}, W {w} times"
                )


def _phases_in_order(rank: int, row: Iterable[Action]) -> Iterator[str]:
    """Check F before I before W for each (stage, micro-batch); B is I, then W."""
    seen: set[Action] = set()
    for action in row:
        before = {Kind.I: Kind.F, Kind.B: Kind.F, Kind.W: Kind.I}.get(action.kind)
        earlier = before and Action(before, action.stage, action.microbatch)
        if earlier and earlier not in seen:
            yield f"rank {rank}: {action} comes before {earlier}"
        seen.add(action)


def _accumulates_in_order(rank: int, row: Iterable[Action]) -> Iterator[str]:
    """Check that each stage's weight gradients come in micro-batch order."""
    last: dict[int, int] = {}
    for action in row:
        if action.kind not in _WEIGHT_GRADIENT:
            continue
        assert action.microbatch is not None
        if action.microbatch < last.get(action.stage, -1):
            yield (
                f"rank {rank}: {action} accumulates after micro-batch {last[action.stage]}; "
                f"the order must be that of the micro-batches"
            )
        last[action.stage] = action.microbatch


def _local_inputs_first(schedule: Schedule, rank: int, row: Iterable[Action]) -> Iterator[str]:
    """Check that what a neighbour stage on the same rank hands over exists before its use."""
    seen: set[tuple[str, int, int | None]] = set()
    for action in row:
        step = {Kind.F: -1, Kind.I: 1, Kind.B: 1}.get(action.kind)
        word = "F" if action.kind is Kind.F else "I"
        if step is not None:
            giver = action.stage + step
            is_local = 0 <= giver < schedule.num_stages and schedule.stage_to_rank[giver] == rank
            if is_local and (word, giver, action.microbatch) not in seen:
                yield f"rank {rank}: {action} comes before the {word} of stage {giver} it reads"
        if action.kind in COMPUTE:
            seen.add((word, action.stage, action.microbatch))


def _transfers(schedule: Schedule, is_training: bool) -> Iterator[str]:
    """Check that each boundary value is sent once after it exists and received once before use."""
    expected = _expected_transfers(schedule, is_training)
    found = Counter(action for _, _, action in schedule.positions() if action.kind in SENDS | RECVS)
    for action in sorted(set(expected) | set(found), key=str):
        wanted = 1 if action in expected else 0
        if found[action] != wanted:
            yield f"{action} is there {found[action]} times, but is needed {wanted} times"
    for rank, row in enumerate(schedule.ranks):
        yield from _transfers_beside_compute(schedule, rank, row)


def _expected_transfers(schedule: Schedule, is_training: bool) -> set[Action]:
    expected: set[Action] = set()
    placement = schedule.stage_to_rank
    for stage in range(schedule.num_stages - 1):
        if placement[stage] == placement[stage + 1]:
            continue
        for number in range(schedule.num_microbatches):
            sends = [Action(Kind.SEND_F, stage, number)]
            if is_training:
                sends.append(Action(Kind.SEND_B, stage + 1, number))
            expected.update(action for send in sends for action in (send, send.partner))
    return expected


def _transfers_beside_compute(
    schedule: Schedule, rank: int, row: tuple[Action, ...]
) -> Iterator[str]:
    at: dict[tuple[Kind, int, int | None], int] = {}
    for index, action in enumerate(row):
        kind = Kind.I if action.kind is Kind.B else action.kind
        at.setdefault((kind, action.stage, action.microbatch), index)
    for index, action in enumerate(row):
        compute = {
            Kind.SEND_F: Kind.F,
            Kind.RECV_F: Kind.F,
            Kind.SEND_B: Kind.I,
            Kind.RECV_B: Kind.I,
        }.get(action.kind)
        place = at.get((compute, action.stage, action.microbatch)) if compute else None
        if place is None:
            continue
        if action.kind in SENDS and index < place:
            yield f"rank {rank}: {action} comes before {row[place]}, whose result it sends"
        if action.kind in RECVS and index > place:
            yield f"rank {rank}: {action} comes after {row[place]}, which reads it"


def _storage(
    schedule: Schedule, reduce_per: ReducePer | None, unshard: Unshard | None
) -> Iterator[str]:
    """Check UNSHARD, RESHARD and REDUCE_GRAD of every stage against how it was lowered."""
    gathers = (0, 1) if unshard is None else (int(unshard == "step"),)
    reductions = (0, 1) if reduce_per is None else (int(reduce_per == "step"),)
    for rank, row in enumerate(schedule.ranks):
        places: _Places = defaultdict(list)
        for index, action in enumerate(row):
            places[action.kind, action.stage].append(index)
        for stage in schedule.stages_of(rank):
            yield from _gathered(rank, stage, places, gathers)
            yield from _reduced(rank, stage, places, reductions)


_Places = defaultdict[tuple[Kind, int], list[int]]


def _gathered(rank: int, stage: int, places: _Places, allowed: Sequence[int]) -> Iterator[str]:
    gathers, releases = places[Kind.UNSHARD, stage], places[Kind.RESHARD, stage]
    if len(gathers) != len(releases) or len(gathers) not in allowed:
        yield (
            f"rank {rank}: stage {stage} needs UNSHARD and RESHARD {_times(allowed)}; "
            f"it has {len(gathers)} and {len(releases)}"
        )
        return
    uses = sorted(place for kind in _READS_PARAMETERS for place in places[kind, stage])
    if gathers and uses and gathers[0] > uses[0]:
        yield f"rank {rank}: {stage}UNSHARD comes after the first use of the stage's parameters"
    if gathers and uses and releases[0] < uses[-1]:
        yield f"rank {rank}: {stage}RESHARD comes before the last use of the stage's parameters"


def _reduced(rank: int, stage: int, places: _Places, allowed: Sequence[int]) -> Iterator[str]:
    reductions = places[Kind.REDUCE_GRAD, stage]
    if len(reductions) not in allowed:
        found = len(reductions)
        yield f"rank {rank}: stage {stage} needs REDUCE_GRAD {_times(allowed)}, not {found}"
        return
    gradients = [place for kind in _WEIGHT_GRADIENT for place in places[kind, stage]]
    if reductions and gradients and reductions[0] < max(gradients):
        yield f"rank {rank}: {stage}REDUCE_GRAD comes before the stage's last weight gradient"


def _times(allowed: Sequence[int]) -> str:
    return f"{' or '.join(map(str, allowed))} times"
