"""Spell out what every rank of a mesh does under a schedule, for the proof of order."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.diagnostics import ScheduleError
from autoshard.mesh import AxisName, Mesh
from autoshard.schedule.action import COMPUTE, RECVS, SENDS, STORAGE, Action, Kind
from autoshard.schedule.event import Event, EventKind
from autoshard.schedule.schedule import Schedule


@dataclass(frozen=True)
class Inside:
    """Name one collective inside the graph that an action runs."""

    axis: AxisName
    tag: str  # equal on all ranks that meet in it: operation, shape, dtype
    where: str = ""  # node and plan line, for messages


# (kind, stage) -> the collectives of its graph, in order. A missing entry has none; B takes I + W.
InsideGraphs = Mapping[tuple[Kind, int], Sequence[Inside]]


def spell_out(
    schedule: Schedule,
    mesh: Mesh | None = None,
    inside: InsideGraphs | None = None,
    *,
    is_batched: bool = False,
) -> list[list[Event]]:
    """Return the events of every rank of the mesh (index = rank) for a lowered schedule.

    Axis `pp` of the mesh holds the schedule's ranks; without a mesh there is only that axis.
    UNSHARD, RESHARD and REDUCE_GRAD have the collectives of `inside` too. `is_batched` posts
    neighbouring transfers of a rank together; without it each is posted by itself, which is
    harder: what is safe so is safe in batches.
    """
    mesh = mesh or Mesh.of(pp=schedule.num_ranks)
    if mesh.size("pp") != schedule.num_ranks:
        raise ScheduleError(
            f"schedule {schedule.name} is for {schedule.num_ranks} pipeline ranks, "
            f"the mesh has pp {mesh.size('pp')}"
        )
    plans = [_plan(schedule, row, inside or {}, is_batched) for row in schedule.ranks]
    return [
        list(_events(mesh, rank, plans[mesh.coordinate(rank).get("pp", 0)]))
        for rank in range(mesh.world_size)
    ]


@dataclass(frozen=True)
class _Step:
    """An event before it is given a rank: its group is a place of pp, or an axis."""

    kind: EventKind
    peer: int = 0
    axis: AxisName = ""
    tag: str = ""
    where: str = ""
    batch: int = 0


def _plan(
    schedule: Schedule, row: Sequence[Action], inside: InsideGraphs, is_batched: bool
) -> list[_Step]:
    steps: list[_Step] = []
    received = {action for action in row if action.kind in RECVS}
    batch = 1
    for action in row:
        if action.kind in SENDS | RECVS:
            steps.append(_transfer(schedule, action, batch if is_batched else 0))
            continue
        batch += 1
        steps += _waits(schedule, received, action)
        steps += _compute(action, inside)
    return steps


def _transfer(schedule: Schedule, action: Action, batch: int) -> _Step:
    kind: EventKind = "send" if action.kind in SENDS else "recv"
    tag = str(action if action.kind in SENDS else action.partner)
    if not 0 <= action.peer_stage < schedule.num_stages:
        raise ScheduleError(f"{action} has no stage {action.peer_stage} to meet")
    peer = schedule.stage_to_rank[action.peer_stage]
    return _Step(kind, peer=peer, tag=tag, where=str(action), batch=batch)


def _waits(schedule: Schedule, received: set[Action], action: Action) -> Iterator[_Step]:
    """Yield the wait for what a compute action receives, if its rank receives it."""
    kind = {Kind.F: Kind.RECV_F, Kind.I: Kind.RECV_B, Kind.B: Kind.RECV_B}.get(action.kind)
    if kind is None:
        return
    recv = Action(kind, action.stage, action.microbatch)
    if recv in received and 0 <= recv.peer_stage < schedule.num_stages:
        peer = schedule.stage_to_rank[recv.peer_stage]
        yield _Step("wait", peer=peer, tag=str(recv.partner), where=f"{action} waits for {recv}")


def _compute(action: Action, inside: InsideGraphs) -> Iterator[_Step]:
    kinds = [action.kind]
    if action.kind is Kind.B and (Kind.B, action.stage) not in inside:
        kinds = [Kind.I, Kind.W]
    for kind in kinds:
        for one in inside.get((kind, action.stage), ()):
            where = f"{action} {one.where}".rstrip()
            yield _Step("collective", axis=one.axis, tag=f"{action} {one.tag}", where=where)
    if action.kind in COMPUTE | STORAGE:
        yield _Step("compute", tag=str(action), where=str(action))


def _events(mesh: Mesh, rank: int, steps: Sequence[_Step]) -> Iterator[Event]:
    line = mesh.group(rank, "pp")
    groups: dict[AxisName, tuple[int, ...]] = {}
    for step in steps:
        group: tuple[int, ...] = ()
        if step.kind == "collective":
            if step.axis not in groups:
                groups[step.axis] = mesh.group(rank, step.axis)
            group = groups[step.axis]
        elif step.kind == "send":
            group = (rank, line[step.peer])
        elif step.kind in ("recv", "wait"):
            group = (line[step.peer], rank)
        yield Event(rank, step.kind, group, step.tag, step.where, step.batch)
