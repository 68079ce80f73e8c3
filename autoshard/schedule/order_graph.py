"""Order the nodes of matched events by "must be finished before", and look for a cycle."""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autoshard.schedule.event import MEETINGS, TRANSFERS, Event, Semantics, pair_waits
from autoshard.schedule.order_quotient import Chosen


class Hold(NamedTuple):
    """Say that a rank does `then` only after `first` is done."""

    first: Event
    then: Event


_Edge = tuple[int, int, int]  # program, position of the earlier event, position of the later one
_Graph = dict[int, list[tuple[int, _Edge]]]


def find_cycle(
    chosen: Chosen, nodes: Sequence[Sequence[int]], semantics: Semantics
) -> tuple[Hold, ...]:
    """Return a cycle as the holds it is made of, a short one; empty where there is none."""
    graph: _Graph = defaultdict(list)
    for index, program in enumerate(chosen.programs):
        edges = _in_order(program) if semantics == "rendezvous" else _on_streams(chosen, index)
        for first, then in edges:
            graph[nodes[index][first]].append((nodes[index][then], (index, first, then)))
    stuck = _stuck(graph)
    if not stuck:
        return ()
    path = _shortest_cycle(graph, stuck, _on_a_cycle(graph, stuck))
    return tuple(
        Hold(chosen.programs[index][first], chosen.programs[index][then])
        for index, first, then in path
    )


def _in_order(program: Sequence[Event]) -> Iterator[tuple[int, int]]:
    """Yield the order under rendezvous: each batch, or event by itself, after the one before."""
    previous: Sequence[int] = ()
    for batch in _batches(program, [i for i, e in enumerate(program) if e.kind != "wait"]):
        yield from ((first, then) for first in previous for then in batch)
        previous = batch


def _on_streams(chosen: Chosen, index: int) -> Iterator[tuple[int, int]]:
    """Yield the order of queues: each stream in order, compute before what it issues, waits."""
    program, keys = chosen.programs[index], chosen.keys[index]
    streams: defaultdict[object, list[int]] = defaultdict(list)
    compute: int | None = None
    pending: list[int] = []  # collectives and receives that the next compute waits for
    waited = pair_waits(program)
    explicit = set(waited.values())
    for place, event in enumerate(program):
        if event.kind in MEETINGS:
            stream = "transfers" if event.kind in TRANSFERS else keys[place]
            streams[stream].append(place)
            if compute is not None:
                yield compute, place
            if event.kind != "send" and place not in explicit:
                pending.append(place)
            continue
        named = waited.get(place)
        ended = [] if named is None else [named]
        if event.kind == "compute":
            ended, pending = pending, []
        if compute is not None:
            yield compute, place
        yield from ((first, place) for first in ended)
        compute = place
    for places in streams.values():
        previous: Sequence[int] = ()
        for batch in _batches(program, places):
            yield from ((first, then) for first in previous for then in batch)
            previous = batch


def _batches(program: Sequence[Event], places: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield neighbouring places of one batch together, all others one by one."""
    batch: list[int] = []
    for place in places:
        joins = batch and program[place].batch > 0 and _joins(program, batch[-1], place)
        if batch and not joins:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _joins(program: Sequence[Event], last: int, place: int) -> bool:
    return place == last + 1 and program[last].batch == program[place].batch


def _stuck(graph: _Graph) -> set[int]:
    """Return the nodes that no topological order reaches."""
    incoming: defaultdict[int, int] = defaultdict(int)
    for edges in graph.values():
        for then, _ in edges:
            incoming[then] += 1
    ready = [node for node in graph if not incoming[node]]
    while ready:
        for then, _ in graph.get(ready.pop(), ()):
            incoming[then] -= 1
            if not incoming[then]:
                ready.append(then)
    return {node for node, number in incoming.items() if number}


def _on_a_cycle(graph: _Graph, stuck: set[int]) -> int:
    """Walk backwards among the stuck nodes, each of which waits for one, until one comes again."""
    before: dict[int, int] = {}
    for node in sorted(stuck):
        for then, _ in graph.get(node, ()):
            before.setdefault(then, node)
    node, seen = min(stuck), set[int]()
    while node not in seen:
        seen.add(node)
        node = before[node]
    return node


def _shortest_cycle(graph: _Graph, stuck: set[int], start: int) -> list[_Edge]:
    came: dict[int, tuple[int, _Edge]] = {}
    queue = deque([start])
    while queue and start not in came:
        node = queue.popleft()
        for then, edge in graph.get(node, ()):
            if then in stuck and then not in came:
                came[then] = (node, edge)
                queue.append(then)
    path: list[_Edge] = []
    node = start
    while not path or node != start:
        node, edge = came[node]
        path.append(edge)
    return path[::-1]
