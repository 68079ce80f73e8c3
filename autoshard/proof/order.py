"""Deadlock order: expand all ranks' schedule actions and graphs to events and prove a run.

Ranks along dp and tp run one text, so two of each stand for all (``shrink``): a group of n equal
members waits exactly as a group of two does. Stages differ and are all expanded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch.fx import Node

from autoshard.diagnostics import AutoshardError
from autoshard.ir.communication import node_traffic
from autoshard.ir.graph_function import BOUNDARY, TANGENT, GraphFunction
from autoshard.ir.invariants_schedule import check_schedulable
from autoshard.ir.node_info import info, val
from autoshard.ir.program import Program
from autoshard.mesh import Axis, Mesh
from autoshard.schedule.action import RECVS, SENDS, Action, Kind
from autoshard.schedule.event import Event
from autoshard.schedule.order import OrderVerdict, Semantics, prove_order

WEIGHTS = (Kind.B, Kind.W)
PHASES_OF = {
    Kind.F: ("F",),
    Kind.I: ("I",),
    Kind.W: ("W",),
    Kind.B: ("I", "W"),
    Kind.UNSHARD: ("U",),
    Kind.REDUCE_GRAD: ("R",),
}


def prove_program(program: Program, semantics: Semantics = "rendezvous") -> OrderVerdict:
    """Return whether all ranks' programs, schedule and graphs together, admit a run."""
    mesh = shrink(program.mesh)
    return prove_order([rank_events(program, mesh, r) for r in range(mesh.world_size)], semantics)


def schedule_problems(program: Program) -> list[str]:
    """Return which rules the schedule breaks: complete, in order, each gradient reduced once."""
    try:
        check_schedulable(program)
    except AutoshardError as error:
        return [str(error)]
    found = []
    for stage in program.stages:
        actions = [a for row in program.schedule.ranks for a in row if a.stage == stage.index]
        reduced = sum(a.kind is Kind.REDUCE_GRAD for a in actions)
        if reduced != ("R" in stage.phases):
            found.append(f"stage {stage.index} reduces its gradients {reduced} times in a step")
        last = max((i for i, a in enumerate(actions) if a.kind in WEIGHTS), default=-1)
        if any(a.kind is Kind.REDUCE_GRAD for a in actions[:last]):
            found.append(f"stage {stage.index} reduces before its last weight gradient")
    return found


def shrink(mesh: Mesh) -> Mesh:
    """Return the mesh with every axis but pp cut to two ranks."""
    axes = (Axis(a.name, a.size if a.name == "pp" else min(a.size, 2)) for a in mesh.axes)
    return Mesh(tuple(axes))


def rank_events(program: Program, mesh: Mesh, rank: int) -> list[Event]:
    """Return everything one rank does, in program order, compute included."""
    pp = mesh.coordinate(rank).get("pp", 0)
    events: list[Event] = []
    for action in program.schedule.ranks[pp]:
        events += _action_events(program, mesh, rank, action)
    return events


def _action_events(program: Program, mesh: Mesh, rank: int, action: Action) -> Iterator[Event]:
    if action.kind in SENDS | RECVS:
        yield _transfer(program, mesh, rank, action)
        return
    stage = program.stages[action.stage]
    for phase in PHASES_OF.get(action.kind, ()):
        if phase in stage.phases:
            where = f"{action} {phase}"
            yield from _graph_events(stage.phases[phase], mesh, rank, where)
    if action.kind not in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD):
        yield Event(rank, "compute", (rank,), str(action), str(action))


def _graph_events(function: GraphFunction, mesh: Mesh, rank: int, where: str) -> Iterator[Event]:
    for node in function.graph.nodes:
        for item in node_traffic(node):
            if mesh.size(item.axis) == 1:
                continue
            group = mesh.group(rank, item.axis)
            if item.members:
                group = tuple(group[i] for i in item.members)
            tag = f"{item.kind} {item.nbytes} B"
            yield Event(rank, "collective", group, tag, f"{where} {info(node).path}")


def _transfer(program: Program, mesh: Mesh, rank: int, action: Action) -> Event:
    peers = mesh.group(rank, "pp")
    peer = peers[program.schedule.stage_to_rank[action.peer_stage]]
    if action.kind in SENDS:
        tag = f"{action} {_sent(program, action)}"
        return Event(rank, "send", (rank, peer), tag, str(action))
    tag = f"{action.partner} {_received(program, action)}"
    return Event(rank, "recv", (peer, rank), tag, str(action))


def _sent(program: Program, send: Action) -> str:
    """Return names and shapes of what the sending stage's graph gives out."""
    phase, port = ("F", BOUNDARY) if send.kind is Kind.SEND_F else ("I", TANGENT)
    return _shapes(program.stages[send.stage].phases[phase].named_results(port))


def _received(program: Program, recv: Action) -> str:
    """Return names and shapes of what the receiving stage's graphs take in."""
    phases = program.stages[recv.stage].phases
    if recv.kind is Kind.RECV_F:
        return _shapes(phases["F"].named(BOUNDARY))
    named = {
        n: node for p in ("I", "W") if p in phases for n, node in phases[p].named(TANGENT).items()
    }
    named.pop("loss", None)
    return _shapes(named)


def _shapes(named: Mapping[str, Node | None]) -> str:
    return " ".join(f"{n}{list(val(v).shape)}" for n, v in sorted(named.items()) if v is not None)
