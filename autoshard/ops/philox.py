"""Philox4x32-10, the counter-based random generator behind dropout, in integer torch ops.

A random word is a pure function of (seed, step, site, global element index), so a mask is the same
on every mesh, in recomputation and in lock step, and is never stored.  The kernels in ``csrc/``
compute the same words bit for bit.  Source: Salmon et al., "Parallel random numbers: as easy as
1, 2, 3" (SC 2011), section 3.3.

Layout: key = (seed low, seed high); counter = (group low, group high, step, site), where
``group = index // 4`` and the element takes word ``index % 4``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from autoshard.diagnostics import OperatorError

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
# Four words come from one counter.
WORDS_PER_GROUP = 4

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Sequence[Tensor], key: Sequence[Tensor | int]) -> Words:
    """Return the four 32-bit words of each counter, as int64 values in [0, 2**32).

    ``counter`` is four int64 tensors that broadcast together, each word in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_words(index: Tensor, seed: Tensor | int, step: Tensor | int, site: int) -> Tensor:
    """Return one random word in [0, 2**32) for each global element index, as int64.

    ``index`` is int64 of any shape; ``step`` may be a scalar int64 tensor, so that a compiled
    graph need not be rebuilt for every step.
    """
    words = group_words(index // WORDS_PER_GROUP, seed, step, site)
    lane = index % WORDS_PER_GROUP
    low = torch.where(lane == 0, words[0], words[1])
    high = torch.where(lane == 2, words[2], words[3])
    return torch.where(lane < 2, low, high)


def group_words(group: Tensor, seed: Tensor | int, step: Tensor | int, site: int) -> Words:
    """Return the words of elements ``4 * group`` to ``4 * group + 3``, as int64."""
    step_word = torch.as_tensor(step, dtype=torch.int64, device=group.device) & _MASK
    site_word = torch.full((), site & _MASK, dtype=torch.int64, device=group.device)
    counter = (group & _MASK, (group >> 32) & _MASK, step_word, site_word)
    return philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))


def keep_threshold(p: float) -> int:
    """Return the word below which an element is dropped: ``p`` in units of 2**-32.

    Raises OperatorError unless 0 <= p < 1.
    """
    if not 0.0 <= p < 1.0:
        raise OperatorError(f"dropout probability must be in [0, 1), found {p}")
    return min(round(p * 2.0**32), _MASK)


def keep_mask(index: Tensor, p: float, seed: Tensor | int, step: Tensor | int, site: int) -> Tensor:
    """Return which elements dropout keeps, as bool: those whose word is at least ``p``."""
    return random_words(index, seed, step, site) >= keep_threshold(p)


def _multiply(value: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """Return the high and low words of a 32 x 32-bit product.

    The int64 product wraps around above 2**63; its bits are those of the unsigned product.
    """
    product = value * constant
    return (product >> 32) & _MASK, product & _MASK
