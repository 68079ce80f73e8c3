"""Reduce the programs of all ranks to one of each kind, where that loses nothing.

Two ranks are of one kind when they do the same events with the same tags on groups that play the
same parts: the k-th group of one joins the same kinds, at the same place of their lists, as the
k-th group of the other. When all ranks of a kind are in step, so are all groups; hence a run of
the reduced programs is a run of all, and the first deadlock of all is one of the reduced.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from autoshard.schedule.event import TRANSFERS, Event

_Part = frozenset[tuple[int, int]]  # of a group: the kinds of its ranks, and its slot with each


@dataclass(frozen=True)
class Chosen:
    """Hold the programs to check; `keys[i][j]` names the group or channel of an event."""

    ranks: tuple[int, ...]
    programs: tuple[Sequence[Event], ...]
    keys: tuple[Sequence[Hashable], ...]
    members: dict[Hashable, tuple[int, ...]]  # key -> those of `ranks` that take part


def one_of_each(programs: Sequence[Sequence[Event]]) -> Chosen:
    """Return one program of each kind; all programs where kinds don't line up."""
    slots = [_slots(program) for program in programs]
    kinds = _number(_signature(program, s) for program, s in zip(programs, slots, strict=True))
    parts = _parts(slots, kinds)
    while parts is not None:
        finer = _number(zip(kinds, parts, strict=True))
        if max(finer) == max(kinds):
            return _reduced(programs, slots, kinds, parts)
        kinds = finer
        parts = _parts(slots, kinds)
    return _everything(programs)


def _slots(program: Sequence[Event]) -> dict[tuple[int, ...], int]:
    """Number a rank's groups by first appearance."""
    slots: dict[tuple[int, ...], int] = {}
    for event in program:
        if event.group not in slots:
            slots[event.group] = len(slots)
    return slots


def _signature(program: Sequence[Event], slots: dict[tuple[int, ...], int]) -> Hashable:
    return tuple((e.kind, e.tag, e.batch, slots[e.group]) for e in program)


def _number(values: Iterable[Hashable]) -> list[int]:
    counter = count()
    seen: dict[Hashable, int] = {}
    result = []
    for value in values:
        if value not in seen:
            seen[value] = next(counter)
        result.append(seen[value])
    return result


def _parts(
    slots: Sequence[dict[tuple[int, ...], int]], kinds: Sequence[int]
) -> list[tuple[_Part, ...]] | None:
    """Return for each rank, slot by slot, the part its group plays; None where one is irregular."""
    known: dict[tuple[int, ...], _Part | None] = {}
    result = []
    for rank, own in enumerate(slots):
        row = []
        for group in own:
            if group not in known:
                known[group] = _part(group, slots, kinds)
            part = known[group]
            if part is None or (group and rank not in group):
                return None
            row.append(part)
        result.append(tuple(row))
    return result


def _part(
    group: tuple[int, ...], slots: Sequence[dict[tuple[int, ...], int]], kinds: Sequence[int]
) -> _Part | None:
    pairs = set()
    for rank in group:
        if not 0 <= rank < len(slots) or group not in slots[rank]:
            return None
        pairs.add((kinds[rank], slots[rank][group]))
    is_regular = len({kind for kind, _ in pairs}) == len(pairs)
    return frozenset(pairs) if is_regular else None


def _reduced(
    programs: Sequence[Sequence[Event]],
    slots: Sequence[dict[tuple[int, ...], int]],
    kinds: Sequence[int],
    parts: Sequence[tuple[_Part, ...]],
) -> Chosen:
    first: dict[int, int] = {}
    for rank, kind in enumerate(kinds):
        first.setdefault(kind, rank)
    ranks = tuple(first.values())
    members: dict[Hashable, tuple[int, ...]] = {}
    keys = []
    for rank in ranks:
        keys.append(
            [(e.kind in TRANSFERS, parts[rank][slots[rank][e.group]]) for e in programs[rank]]
        )
        for is_transfer, part in set(keys[-1]):
            members[is_transfer, part] = tuple(sorted(first[kind] for kind, _ in part))
    return Chosen(ranks, tuple(programs[rank] for rank in ranks), tuple(keys), members)


def _everything(programs: Sequence[Sequence[Event]]) -> Chosen:
    keys = tuple([(e.kind in TRANSFERS, e.group) for e in program] for program in programs)
    members: dict[Hashable, tuple[int, ...]] = {key: key[1] for row in keys for key in row}
    return Chosen(tuple(range(len(programs))), tuple(programs), keys, members)
