"""How long the actions of a schedule take, in any one unit of time, and what they hold."""

import math
from dataclasses import dataclass
from fractions import Fraction

from autoshard.diagnostics import ScheduleError
from autoshard.schedule.action import Action, Kind

Number = int | float | Fraction
PerStage = Number | tuple[Number, ...]


@dataclass(frozen=True)
class Costs:
    """Give the time of each compute kind per stage, and of one transfer between stages.

    A field is one number for all stages or a tuple with one number a stage; `send[s]` is the
    time between stage `s` and `s + 1`, either way. `B` takes `I + W`. With integers or fractions
    every simulated time is exact. `kept` is the share of an activation that is still held between
    the input gradient and the weight gradient.
    """

    F: PerStage = 1
    I: PerStage = 1  # noqa: E741 - the field's word
    W: PerStage = 1
    send: PerStage = 0
    kept: Number = 1

    def __post_init__(self) -> None:
        """Refuse times that are negative, and a share that isn't one."""
        for word in ("F", "I", "W", "send"):
            values = _values(getattr(self, word))
            if not values or min(values) < 0:
                raise ScheduleError(f"cost {word} must not be negative; got {getattr(self, word)}")
        if not 0 <= self.kept <= 1:
            raise ScheduleError(f"kept is a share from 0 to 1; got {self.kept}")

    def of(self, action: Action) -> Number:
        """Return the time of a compute action."""
        if action.kind is Kind.B:
            return _at(self.I, action.stage) + _at(self.W, action.stage)
        return _at(getattr(self, action.kind.value), action.stage)

    def transfer(self, stage: int) -> Number:
        """Return the time of one transfer between `stage` and the stage after it."""
        return _at(self.send, stage)

    def check(self, num_stages: int) -> None:
        """Refuse per-stage times for another number of stages."""
        for word, needed in (("F", num_stages), ("I", num_stages), ("W", num_stages)):
            value = getattr(self, word)
            if isinstance(value, tuple) and len(value) != needed:
                raise ScheduleError(f"cost {word} has {len(value)} stages, the schedule {needed}")
        if isinstance(self.send, tuple) and len(self.send) < num_stages - 1:
            raise ScheduleError(
                f"cost send has {len(self.send)} boundaries, the schedule {num_stages - 1}"
            )

    def divided(self, parts: int) -> "Costs":
        """Return the costs of stages that have one of `parts` of the layers each; send stays."""
        f, i, w = (
            tuple(Fraction(value) / parts for value in _values(getattr(self, word)))
            for word in ("F", "I", "W")
        )
        return Costs(_unpack(f), _unpack(i), _unpack(w), self.send, self.kept)

    def whole(self) -> "Costs":
        """Return the same costs in a unit that makes every time an integer; floats stay."""
        rows = [_values(getattr(self, word)) for word in ("F", "I", "W", "send")]
        if any(isinstance(value, float) for row in rows for value in row):
            return self
        scale = math.lcm(*(Fraction(value).denominator for row in rows for value in row))
        scaled = [tuple(int(value * scale) for value in row) for row in rows]
        f, i, w, send = (_unpack(row) for row in scaled)
        return Costs(f, i, w, send, self.kept)


def parse_costs(text: str, kept: str = "1") -> Costs:
    """Return the costs written as ``F,I,W`` or ``F,I,W,SEND``, exact as fractions."""
    words = text.split(",")
    if len(words) not in (3, 4):
        raise ScheduleError(f"costs are F,I,W or F,I,W,SEND; got {len(words)} numbers in '{text}'")
    try:
        f, i, w, send = (_exact(word) for word in (*words, "0")[:4])
        return Costs(f, i, w, send, _exact(kept))
    except ValueError as error:
        raise ScheduleError(
            f"costs are numbers, as in '1,1,1,0' and 1; got '{text}' and '{kept}'"
        ) from error


def _exact(word: str) -> Number:
    value = Fraction(word.strip())
    return int(value) if value.denominator == 1 else value


def _values(value: PerStage) -> tuple[Number, ...]:
    return value if isinstance(value, tuple) else (value,)


def _unpack(row: tuple[Number, ...]) -> PerStage:
    return row[0] if len(row) == 1 else row


def _at(value: PerStage, stage: int) -> Number:
    return value[stage] if isinstance(value, tuple) else value


UNIT = Costs()
