"""Dropout draws one mask for a global value, however the value is cut."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.compat import FakeTensorMode
from autoshard.ops.dropout import DropoutArgs, dropout, global_index, keep
from autoshard.ops.library import spec
from autoshard.ops.one_rank import OneRank
from autoshard.ops.philox import keep_mask


class Rank(OneRank):
    """A rank with one coordinate on every axis."""

    def __init__(self, index: int) -> None:
        self._index = index

    def index(self, axis: str) -> int:
        return self._index


def rng(sample: int = 0, step: int = 3, seed: int = 11) -> torch.Tensor:
    return torch.tensor([seed, step, sample])


def whole_mask(shape: tuple[int, ...], batch_dim: int = 0, rows: int = 1) -> torch.Tensor:
    args = DropoutArgs(torch.zeros(shape), rng(), 0.5, 7, batch_dim, rows)
    return keep(args, OneRank())


def test_microbatches_draw_the_mask_of_their_samples() -> None:
    whole = whole_mask((4, 6, 8))
    for first in (0, 2):
        part = DropoutArgs(torch.zeros(2, 6, 8), rng(first), 0.5, 7, 0)
        assert torch.equal(keep(part, OneRank()), whole[first : first + 2])


def test_a_batch_dimension_in_the_middle_numbers_by_sample_too() -> None:
    whole = whole_mask((6, 4, 8), batch_dim=1)
    part = DropoutArgs(torch.zeros(6, 2, 8), rng(2), 0.5, 7, 1)
    assert torch.equal(keep(part, OneRank()), whole[:, 2:4])
    assert torch.equal(whole.transpose(0, 1), whole_mask((4, 6, 8)))


@pytest.mark.parametrize("width", [8, 6])
def test_a_shard_draws_the_mask_of_its_place(width: int) -> None:
    whole = whole_mask((2, 4, 2 * width))
    args = DropoutArgs(torch.zeros(2, 4, width), rng(), 0.5, 7, 0)
    for index in (0, 1):
        part = keep(args.sharded(2, (), "tp", 2), Rank(index))
        assert torch.equal(part, whole[..., index * width : (index + 1) * width])


def test_a_merged_batch_and_head_dimension_is_cut_in_blocks() -> None:
    heads, samples = 4, 2
    whole = whole_mask((samples * heads, 3, 4), rows=heads).view(samples, heads, 3, 4)
    args = DropoutArgs(torch.zeros(samples * 2, 3, 4), rng(), 0.5, 7, 0, heads)
    for index in (0, 1):
        part = keep(args.sharded(0, (heads,) * samples, "tp", 2), Rank(index))
        mine = whole[:, 2 * index : 2 * index + 2].reshape(part.shape)
        assert torch.equal(part, mine)


@pytest.mark.parametrize("shape", [(2, 8), (2, 3), (8,), ()])
def test_groups_of_four_give_the_same_mask_as_single_elements(shape: tuple[int, ...]) -> None:
    batch_dim = 0 if shape else -1
    args = DropoutArgs(torch.zeros(shape), rng(), 0.5, 7, batch_dim)
    one_by_one = torch.stack(
        [
            keep(DropoutArgs(torch.zeros(()), rng(), 0.5, 7), OneRank())
            if not shape
            else _single(int(i))
            for i in global_index(args, OneRank()).flatten()
        ]
    )
    assert torch.equal(keep(args, OneRank()).flatten(), one_by_one)


def _single(index: int) -> torch.Tensor:
    return keep_mask(torch.tensor(index), 0.5, 11, 3, 7)


def test_step_site_and_seed_change_the_mask() -> None:
    base = DropoutArgs(torch.zeros(4, 64), rng(), 0.5, 7, 0)
    masks = [
        keep(args, OneRank())
        for args in (
            base,
            base._replace(site=8),
            base._replace(rng=rng(step=4)),
            base._replace(rng=rng(seed=12)),
        )
    ]
    assert all(not torch.equal(masks[0], other) for other in masks[1:])


def test_backward_is_the_same_op_on_the_gradient() -> None:
    def grad(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(dropout(x, *DropoutArgs(x, r, 0.5, 7, 0)[1:]).sum(), x)[0]

    with FakeTensorMode():
        fakes = torch.empty(2, 4, requires_grad=True), torch.empty(3, dtype=torch.int64)
    nodes = make_fx(grad)(*fakes).graph.find_nodes(op="call_function", target=dropout)
    assert len(nodes) == 2 and nodes[0].args[1:] == nodes[1].args[1:]


def test_what_is_kept_is_scaled_and_the_rest_is_zero() -> None:
    x = torch.rand(64, 64, dtype=torch.float64) + 1
    args = DropoutArgs(x, rng(), 0.25, 7, 0)
    y = spec(dropout).run(OneRank(), *args)
    kept = keep(args, OneRank())
    torch.testing.assert_close(y, torch.where(kept, x / 0.75, 0.0), rtol=1e-15, atol=0)
    assert abs(kept.double().mean() - 0.75) < 0.02
