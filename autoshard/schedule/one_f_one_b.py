"""1F1B: as soon as a rank can, it follows each forward by a backward (Narayanan et al. 2019)."""

from autoshard.schedule.action import Action, Kind


def one_f_one_b(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Return each rank's actions; rank r holds at most `num_ranks - r` activations."""
    return [_row(rank, num_ranks - rank - 1, num_microbatches) for rank in range(num_ranks)]


def _row(stage: int, warmup: int, num_microbatches: int) -> list[Action]:
    warmup = min(warmup, num_microbatches)
    row = [Action(Kind.F, stage, number) for number in range(warmup)]
    for number in range(num_microbatches - warmup):
        row += [Action(Kind.F, stage, warmup + number), Action(Kind.B, stage, number)]
    row += [Action(Kind.B, stage, n) for n in range(num_microbatches - warmup, num_microbatches)]
    return row
