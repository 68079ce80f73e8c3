"""One action of a pipeline schedule, and its text form (torch's: ``2F0``, ``1SEND_F3``)."""

import re
from dataclasses import dataclass
from enum import Enum

from autoshard.diagnostics import ScheduleError


class Kind(Enum):
    """Say what an action does; the value is its word in the text form.

    ``B`` is the full backward: ``I`` (input gradient), then ``W`` (weight gradient).
    ``SEND_F`` goes to the next stage, ``SEND_B`` to the one before; a value that skips stages
    is relayed stage by stage, so there is never another partner.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's word for the input gradient
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECVS = frozenset({Kind.RECV_F, Kind.RECV_B})
STORAGE = frozenset(
    {Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD}
)  # a stage's, not a micro-batch's

# Which receive meets a send, and how far away its stage is.
MEETS = {Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}
TOWARDS = {Kind.SEND_F: 1, Kind.SEND_B: -1, Kind.RECV_F: -1, Kind.RECV_B: 1}

_WORDS = "|".join(sorted((k.value for k in Kind), key=len, reverse=True))
_TEXT = re.compile(rf"(\d+)({_WORDS})(\d*)")


@dataclass(frozen=True)
class Action:
    """Do one thing for one stage and, except for storage actions, one micro-batch."""

    kind: Kind
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        """Return torch's text form, as in ``0F0`` or ``2UNSHARD``."""
        suffix = "" if self.microbatch is None else str(self.microbatch)
        return f"{self.stage}{self.kind.value}{suffix}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Return the action that prints as `text`; raise ScheduleError for any other text."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"'{text.strip()}' isn't an action of a schedule",
                help="write stage, kind, micro-batch, as in '0F0', '1SEND_B3', or '2UNSHARD'",
            )
        kind, number = Kind(match[2]), match[3]
        if (kind in STORAGE) == bool(number):
            rule = "takes no micro-batch" if kind in STORAGE else "needs a micro-batch"
            raise ScheduleError(f"'{text.strip()}': {kind.value} {rule}")
        return cls(kind, int(match[1]), int(number) if number else None)

    @property
    def peer_stage(self) -> int:
        """Return the stage at the other end of a SEND or RECV."""
        return self.stage + TOWARDS[self.kind]

    @property
    def partner(self) -> "Action":
        """Return the receive that meets this send, or the send that meets this receive."""
        if self.kind in SENDS:
            return Action(MEETS[self.kind], self.peer_stage, self.microbatch)
        opposite = {recv: send for send, recv in MEETS.items()}
        return Action(opposite[self.kind], self.peer_stage, self.microbatch)
