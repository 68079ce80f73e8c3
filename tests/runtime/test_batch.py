"""Micro-batches, signatures and hashes."""

import pytest
import torch

from autoshard.diagnostics import BatchError
from autoshard.ir.program import BatchLeaf
from autoshard.runtime.batch import batch_signature, check_rows, hash_values, split_leaves

IDS = BatchLeaf("ids", (2, 5), torch.int64)
MASK = BatchLeaf("mask", (1, 5), torch.bool, is_split=False)


def test_samples_are_split_and_shared_leaves_go_to_every_micro_batch():
    ids, mask = torch.arange(30).view(6, 5), torch.ones(1, 5, dtype=torch.bool)
    parts = split_leaves({"ids": ids, "mask": mask}, (IDS, MASK), 3)
    assert [p["ids"].tolist() for p in parts] == [ids[i : i + 2].tolist() for i in (0, 2, 4)]
    assert all(p["mask"] is mask for p in parts)
    assert parts[1]["ids"].data_ptr() == ids[2:].data_ptr()  # a view, not a copy


def test_a_batch_of_the_wrong_size_is_refused_with_the_numbers():
    with pytest.raises(BatchError) as caught:
        check_rows({"ids": torch.zeros(5, 3), "one": torch.zeros(1, 3)}, 2, 3)
    assert "'ids' has 5 samples, the plan needs 6: micro_batch_size 2 x num_microbatches 3" in str(
        caught.value
    )


def test_a_batch_with_only_shared_leaves_is_refused():
    with pytest.raises(BatchError, match="no leaf of the batch has 4 samples"):
        check_rows({"ids": torch.zeros(1, 3)}, 2, 2)


def test_one_sample_per_rank_is_a_batch():
    check_rows({"ids": torch.zeros(1, 3)}, 1, 1)


def test_missing_leaves_and_other_dtypes_are_refused():
    with pytest.raises(BatchError, match="the batch lacks 'ids'"):
        split_leaves({"other": torch.zeros(4, 5)}, (IDS,), 2)
    with pytest.raises(BatchError, match=r"float32 \[4, 5\], the program takes torch\.int64"):
        split_leaves({"ids": torch.zeros(4, 5)}, (IDS,), 2)


def test_the_hash_tells_values_shapes_names_and_order_apart():
    base = {"x": torch.arange(6)}
    others = [
        {"x": torch.arange(6).flip(0)},
        {"x": torch.arange(6).view(2, 3)},
        {"y": torch.arange(6)},
        {"x": torch.arange(6, dtype=torch.int32)},
        {"x": torch.arange(0)},
    ]
    hashes = [hash_values(leaves) for leaves in (base, *others)]
    assert len(set(hashes)) == len(hashes)
    assert hash_values({"x": torch.arange(12)[::2] // 2}) == hashes[0]  # strides don't matter


def test_the_signature_is_of_shapes_and_dtypes_only():
    assert batch_signature({"x": torch.zeros(2)}) == batch_signature({"x": torch.ones(2)})
    assert batch_signature({"x": torch.zeros(2)}) != batch_signature({"x": torch.zeros(2).long()})


@pytest.mark.parametrize("length", [33, 4097])
def test_a_batch_cut_from_a_longer_one_hashes_like_its_copy(length: int) -> None:
    # The hash reads bytes of a copy, which must not be freed before.
    tokens = torch.arange(8 * length).view(8, length)
    for part in (tokens[:, :-1], tokens[:, 1:]):
        assert hash_values({"x": part}) == hash_values({"x": part.clone().contiguous()})
