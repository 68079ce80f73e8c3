"""Find which events of different ranks are one and the same, and those that never meet."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autoshard.schedule.event import MEETINGS, TRANSFERS, Event, pair_waits
from autoshard.schedule.order_quotient import Chosen


@dataclass
class Matched:
    """Hold the node of every event (events that meet share one), or what doesn't meet."""

    nodes: list[list[int]] = field(default_factory=list)
    reason: Literal["", "mismatch", "missing"] = ""
    message: str = ""
    events: tuple[Event, ...] = ()


def match_events(chosen: Chosen) -> Matched:
    """Pair the k-th events of all who share a group or channel, and compare their tags."""
    for event in (e for program in chosen.programs for e in program):
        if event.kind in MEETINGS and not _takes_part(event):
            text = f"rank {event.rank} does '{event}' on ranks {event.group}, where it has no part"
            return Matched(reason="mismatch", message=text, events=(event,))
    for program in chosen.programs:
        lost = next((place for place, start in pair_waits(program).items() if start is None), None)
        if lost is not None:
            text = f"rank {program[lost].rank} waits at '{program[lost]}' for what it never started"
            return Matched(reason="missing", message=text, events=(program[lost],))
    queues, nodes = _queue(chosen)
    for key, queue in queues.items():
        problem = _compare(key, queue, chosen.members[key])
        if problem is not None:
            return problem
    return Matched(nodes)


def _takes_part(event: Event) -> bool:
    if event.kind in TRANSFERS:
        place = 0 if event.kind == "send" else 1
        return len(set(event.group)) == 2 and event.group[place] == event.rank
    return event.rank in event.group


# For one group or channel: who takes part (a rank and what it does) -> its events in order.
_Queue = dict[tuple[int, str], list[Event]]


def _queue(chosen: Chosen) -> tuple[dict[Hashable, _Queue], list[list[int]]]:
    queues: defaultdict[Hashable, _Queue] = defaultdict(dict)
    numbers: dict[tuple[Hashable, int], int] = {}
    nodes: list[list[int]] = []
    total = 0
    for program, keys in zip(chosen.programs, chosen.keys, strict=True):
        row = []
        for event, key in zip(program, keys, strict=True):
            node = total
            if event.kind in MEETINGS:
                own = queues[key].setdefault((event.rank, event.kind), [])
                node = numbers.setdefault((key, len(own)), total)
                own.append(event)
            total += node == total
            row.append(node)
        nodes.append(row)
    return queues, nodes


def _compare(key: Hashable, queue: _Queue, members: Sequence[int]) -> Matched | None:
    longest = max(queue.values(), key=len)
    sides = list(_sides(longest[0], members))
    for place, event in enumerate(longest):
        for side in sides:
            own = queue.get(side, [])
            if place >= len(own):
                return _missing(event, side, place, len(longest))
            if own[place].tag != event.tag:
                return _mismatch(event, own[place], place)
    return None


def _sides(event: Event, members: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield who must take part: every member of a group, or both ends of a channel."""
    if event.kind == "collective":
        yield from ((rank, "collective") for rank in members)
    else:
        source = event.rank if event.kind == "send" else next(m for m in members if m != event.rank)
        target = next(m for m in members if m != source)
        yield from ((source, "send"), (target, "recv"))


def _missing(event: Event, side: tuple[int, str], done: int, needed: int) -> Matched:
    rank, kind = side
    text = (
        f"rank {event.rank} waits for ever at '{event}' ({_channel(event)}): "
        f"rank {rank} does {done} of {needed} {kind}s there"
    )
    return Matched(reason="missing", message=text, events=(event,))


def _mismatch(event: Event, other: Event, place: int) -> Matched:
    first, second = sorted((event, other), key=lambda e: e.rank)
    text = (
        f"rank {first.rank} does '{first}' where rank {second.rank} does '{second}' "
        f"({_channel(event)}, number {place + 1}): tags '{first.tag}' and '{second.tag}'"
    )
    return Matched(reason="mismatch", message=text, events=(first, second))


def _channel(event: Event) -> str:
    if event.kind in TRANSFERS:
        return f"transfers from rank {event.group[0]} to rank {event.group[1]}"
    return f"collectives on ranks {', '.join(map(str, event.group))}"
