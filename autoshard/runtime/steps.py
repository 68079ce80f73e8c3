"""A rank's share of the schedule as calls that are ready to be made, once for all steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from autoshard.ir.graph_function import Port
from autoshard.runtime.messages import Letter, microbatch_of
from autoshard.runtime.run import Run
from autoshard.runtime.wiring import Wiring
from autoshard.runtime.work import Transfer
from autoshard.schedule import Action, Kind
from autoshard.schedule.action import RECVS, SENDS
from autoshard.schedule.posting import posted

if TYPE_CHECKING:
    from autoshard.runtime.executor import Executable

_PHASES = {Kind.B: ("I", "W"), Kind.F: ("F",), Kind.I: ("I",), Kind.W: ("W",)}
_STORAGE: dict[Kind, Callable[[Run, int], None]] = {
    Kind.UNSHARD: Run.unshard,
    Kind.RESHARD: Run.reshard,
    Kind.REDUCE_GRAD: Run.reduce,
}


class Step(NamedTuple):
    """What is done at once: one action, or transfers; ``call(run, *args)`` does it."""

    actions: tuple[Action, ...]
    call: Callable[..., None]
    args: tuple


@dataclass(frozen=True)
class Post:
    """The messages of one SEND or RECV action."""

    stage: int
    number: int
    lane: tuple[Kind, int]  # what is sent on one lane is delivered in order
    sends: tuple[Letter, ...]
    receives: tuple[tuple[Port, Transfer], ...]


def prepare(exe: Executable, row: tuple[Action, ...]) -> Iterator[Step]:
    """Yield the steps of the rank that carries out ``row``."""
    for actions in posted(row):
        action = actions[0]
        if action.kind in SENDS | RECVS:
            yield Step(actions, Run.transfer, (tuple(_post(exe, a) for a in actions),))
        elif action.kind in _STORAGE:
            yield Step(actions, _STORAGE[action.kind], (action.stage,))
        else:
            wirings = tuple(_wirings(exe, action))
            yield Step(actions, Run.compute, (wirings, microbatch_of(action)))


def _post(exe: Executable, action: Action) -> Post:
    lane = (action.kind, action.stage)
    letters = exe.messages.letters(action) if action.kind in SENDS else ()
    receives = exe.messages.receives.get(action, ())
    return Post(action.stage, microbatch_of(action), lane, letters, receives)


def _wirings(exe: Executable, action: Action) -> Iterator[Wiring]:
    for name in _PHASES[action.kind]:
        if (action.stage, name) in exe.wirings:
            yield exe.wirings[action.stage, name]
