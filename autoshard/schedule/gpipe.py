"""GPipe: all forwards, then all backwards (Huang et al. 2019). Simplest, and holds most."""

from autoshard.schedule.action import Action, Kind


def gpipe(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Return each rank's actions; every activation of the step is held at the turning point."""
    numbers = range(num_microbatches)
    return [
        [Action(kind, rank, number) for kind in (Kind.F, Kind.B) for number in numbers]
        for rank in range(num_ranks)
    ]
