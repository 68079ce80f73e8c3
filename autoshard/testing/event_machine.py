"""Run events of all ranks as blocking machines: an oracle that shares no code with the proof.

It must find a run exactly where `prove_order` under rendezvous says that one exists.
"""

from collections.abc import Sequence

from autoshard.schedule.event import Event


def run_events(programs: Sequence[Sequence[Event]]) -> str:
    """Return "" if every rank gets to its end, else what went wrong."""
    at = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                who = _who_meets(programs, at, program[at[rank]])
                if who is None:
                    break
                tags = {programs[one][at[one]].tag for one in who}
                if len(tags) > 1:
                    return f"ranks {sorted(who)} meet with {sorted(tags)}"
                if not _was_started(program[: at[rank]], program[at[rank]]):
                    return f"rank {rank} waits for what it never started"
                for one in who:
                    at[one] += 1
                moved = True
    stuck = [rank for rank, program in enumerate(programs) if at[rank] < len(program)]
    return f"ranks {stuck} are stuck" if stuck else ""


def _who_meets(
    programs: Sequence[Sequence[Event]], at: Sequence[int], event: Event
) -> set[int] | None:
    """Return the ranks that do this event together now; None while one isn't there."""
    if event.kind in ("compute", "wait"):
        return {event.rank}
    if event.kind == "collective":
        members = set(event.group)
        kinds = {rank: "collective" for rank in members}
    else:
        members = set(event.group)
        kinds = {event.group[0]: "send", event.group[1]: "recv"}
    if event.rank not in members or kinds[event.rank] != event.kind:
        return None
    for rank in members:
        if not 0 <= rank < len(programs) or at[rank] >= len(programs[rank]):
            return None
        there = programs[rank][at[rank]]
        if there.group != event.group or there.kind != kinds[rank]:
            return None
    return members


def _was_started(before: Sequence[Event], event: Event) -> bool:
    """Tell whether a wait comes after as many events of its group and tag as it needs."""
    if event.kind != "wait":
        return True
    same = [e for e in before if (e.group, e.tag) == (event.group, event.tag)]
    return sum(1 if e.kind in ("recv", "collective") else -1 for e in same) > 0
