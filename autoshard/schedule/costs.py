"""How long the actions of a schedule take, in any one unit of time."""

from collections.abc import Sequence
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
    every simulated time is exact.
    """

    F: PerStage = 1
    I: PerStage = 1  # noqa: E741 - the field's word
    W: PerStage = 1
    send: PerStage = 0

    def __post_init__(self) -> None:
        """Refuse times that are negative."""
        for word in ("F", "I", "W", "send"):
            value = getattr(self, word)
            values = value if isinstance(value, tuple) else (value,)
            if not values or min(values) < 0:
                raise ScheduleError(f"cost {word} must not be negative; got {value}")

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


UNIT = Costs()


def parse_costs(text: str) -> Costs:
    """Return the costs written as ``F,I,W`` or ``F,I,W,SEND``, kept exact as fractions."""
    words = text.split(",")
    if len(words) not in (3, 4):
        raise ScheduleError(f"costs are F,I,W or F,I,W,SEND; got {len(words)} numbers in '{text}'")
    try:
        return Costs(*(_exact(word) for word in words))
    except ValueError as error:
        raise ScheduleError(f"costs are numbers, as in '1,1,1,0'; got '{text}'") from error


def _exact(word: str) -> Number:
    value = Fraction(word.strip())
    return int(value) if value.denominator == 1 else value


def _at(value: PerStage, stage: int) -> Number:
    return value[stage] if isinstance(value, Sequence) else value
