"""ZB-H2: more forwards in the warmup, so that no rank waits once it began (Qi et al. 2023).

Idle time of a rank between its own first and last action is (p-1) (F + I - 2 W): none where the
three are equal. It holds almost twice the activations of 1F1B.
"""

from autoshard.schedule.action import Action
from autoshard.schedule.split_backward import split_row


def zb_h2(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Return each rank's actions; every rank holds at most `2 * num_ranks - 1` activations."""
    return [
        split_row(rank, num_microbatches, warmup=2 * (num_ranks - rank) - 1, lag=2 * rank)
        for rank in range(num_ranks)
    ]
