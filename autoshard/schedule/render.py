"""Show a simulation as a text grid, and as a trace that chrome://tracing and Perfetto open."""

import math
from fractions import Fraction

from autoshard.schedule.action import Kind
from autoshard.schedule.costs import Number
from autoshard.schedule.simulate import Simulation
from autoshard.schedule.timeline import Timed

# The weight gradient is `w`, so the letters of the backwards end before it.
_BACKWARD = "abcdefghijklmnopqrstuv"
_FORWARD = "0123456789"


def render_grid(simulation: Simulation, max_width: int = 400) -> str:
    """Return one line a rank: digits forward, letters backward, `w` weight gradient, `.` idle.

    The digit is the last one of the micro-batch, the letter its place in the alphabet; both begin
    again when they run out. A column is the largest time that divides all costs, or more where
    that would be wider than `max_width`.
    """
    column = _column(simulation, max_width)
    width = math.ceil(simulation.step_time / column)
    digits = len(str(simulation.schedule.num_ranks - 1))
    lines = []
    for rank, row in enumerate(simulation.ranks):
        cells = ["."] * width
        for timed in row:
            start, end = round(timed.start / column), round(timed.end / column)
            cells[start:end] = _letter(timed) * (end - start)
        lines.append(f"rank {rank:>{digits}}  {''.join(cells)}")
    return "\n".join(lines)


def chrome_trace(simulation: Simulation, unit_us: float = 1000.0) -> dict[str, object]:
    """Return the trace-event form: one lane a rank, one slice a compute action.

    `unit_us` is how many microseconds one unit of cost is drawn as.
    """
    events: list[dict[str, object]] = []
    for rank, row in enumerate(simulation.ranks):
        name = {"name": f"rank {rank}"}
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": name})
        events += [_slice(timed, unit_us) for timed in row]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slice(timed: Timed, unit_us: float) -> dict[str, object]:
    action = timed.action
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.kind.value,
        "pid": 0,
        "tid": timed.rank,
        "ts": float(timed.start) * unit_us,
        "dur": float(timed.end - timed.start) * unit_us,
        "args": {"stage": action.stage, "microbatch": action.microbatch},
    }


def _letter(timed: Timed) -> str:
    number = timed.action.microbatch
    assert number is not None
    if timed.action.kind is Kind.F:
        return _FORWARD[number % len(_FORWARD)]
    return "w" if timed.action.kind is Kind.W else _BACKWARD[number % len(_BACKWARD)]


def _column(simulation: Simulation, max_width: int) -> Number:
    """Return the time of one column: the greatest common divisor of all times, if that fits."""
    times = {timed.start for row in simulation.ranks for timed in row}
    times |= {timed.end for row in simulation.ranks for timed in row}
    widest = Fraction(simulation.step_time) / max_width
    exact = [Fraction(value) for value in times if value]
    scale = math.lcm(*(value.denominator for value in exact))
    divisor = Fraction(math.gcd(*(int(value * scale) for value in exact)), scale)
    return divisor if divisor >= widest else widest or 1
