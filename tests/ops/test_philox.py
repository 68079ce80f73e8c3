"""The random generator: published test vectors, independence of the mesh, fair coins."""

import pytest
import torch

from autoshard.diagnostics import OperatorError
from autoshard.ops.philox import keep_mask, keep_threshold, philox4x32, random_words

FULL = 0xFFFFFFFF
# Known answers that the authors of Philox publish with it (kat_vectors: counter, key, words).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL,) * 4, (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_words_equal_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    words = philox4x32([torch.tensor([value]) for value in counter], key)
    assert tuple(int(word) for word in words) == expected


def test_a_shard_draws_the_words_of_its_place_in_the_whole() -> None:
    whole = random_words(torch.arange(40), seed=7, step=3, site=2)
    assert torch.equal(random_words(torch.arange(13, 29), seed=7, step=3, site=2), whole[13:29])


def test_seed_step_site_and_high_index_bits_all_change_the_words() -> None:
    index = torch.arange(64)
    base = random_words(index, 1, 1, 1)
    others = [
        random_words(index, 2, 1, 1),
        random_words(index, 1 + (1 << 32), 1, 1),
        random_words(index, 1, 2, 1),
        random_words(index, 1, 1, 2),
        random_words(index + (1 << 34), 1, 1, 1),
    ]
    for other in others:
        assert not torch.equal(base, other)


def test_step_may_be_a_tensor_so_that_graphs_are_reused() -> None:
    index = torch.arange(9)
    assert torch.equal(random_words(index, 1, torch.tensor(5), 0), random_words(index, 1, 5, 0))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_elements_is_p(p: float) -> None:
    kept = keep_mask(torch.arange(100_000), p, seed=0, step=0, site=0).double().mean()
    assert abs(float(kept) - (1 - p)) < 0.006


def test_a_probability_of_one_is_refused() -> None:
    with pytest.raises(OperatorError, match=r"found 1\.0"):
        keep_threshold(1.0)
