"""ZB-H1: 1F1B with the backward split, and no more memory than 1F1B (Qi et al. 2023).

Idle time per rank is (p-1) (F + I - W), against (p-1) (F + I + W) for 1F1B.
"""

from autoshard.schedule.action import Action
from autoshard.schedule.split_backward import split_row


def zb_h1(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Return each rank's actions; every rank holds at most `num_ranks` activations."""
    return [
        split_row(rank, num_microbatches, warmup=num_ranks - rank, lag=rank)
        for rank in range(num_ranks)
    ]
