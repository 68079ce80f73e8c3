"""Which rank holds which stage: in loops over the ranks, or in a V."""


def in_loops(num_ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Return ranks 0, 1, ..., p-1, 0, 1, ...: stage s is on rank s mod p."""
    return tuple(range(num_ranks)) * virtual_stages


def in_a_v(num_ranks: int, virtual_stages: int = 2) -> tuple[int, ...]:
    """Return ranks 0, 1, ..., p-1, p-1, ..., 1, 0: the first rank holds the first and the last."""
    assert virtual_stages == 2
    return (*range(num_ranks), *reversed(range(num_ranks)))
