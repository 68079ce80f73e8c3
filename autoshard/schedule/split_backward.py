"""The common pattern of the zero-bubble schedules with one stage a rank.

A rank does `warmup` forwards; then input gradient, weight gradient, forward in turns, where the
weight gradients lag behind the input gradients by `lag` micro-batches. What lags fills the bubble
at the end of the step.
"""

from autoshard.schedule.action import Action, Kind


def split_row(stage: int, num_microbatches: int, warmup: int, lag: int) -> list[Action]:
    """Return one rank's actions; it holds at most `warmup + lag` activations."""
    ahead = min(warmup, num_microbatches)
    row = [Action(Kind.F, stage, number) for number in range(ahead)]
    for number in range(num_microbatches):
        row.append(Action(Kind.I, stage, number))
        if number >= lag:
            row.append(Action(Kind.W, stage, number - lag))
        if number + ahead < num_microbatches:
            row.append(Action(Kind.F, stage, number + ahead))
    late = range(max(0, num_microbatches - lag), num_microbatches)
    return row + [Action(Kind.W, stage, number) for number in late]
