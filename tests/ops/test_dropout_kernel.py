"""The compiled dropout draws the reference's mask, bit for bit, wherever it runs."""

import pytest
import torch
from torch import Tensor

from autoshard.ops import dropout_runs, native
from autoshard.ops.communicator import Communicator
from autoshard.ops.dropout import DropoutArgs, dropout, keep
from autoshard.ops.dropout_runs import find_runs, run_kernel
from autoshard.ops.library import spec
from autoshard.ops.one_rank import OneRank
from tests.ops.norms import DTYPES

needs_kernel = pytest.mark.skipif(native.CPU.module is None, reason=f"_native: {native.CPU.reason}")


class Rank(OneRank):
    """A rank with one coordinate on every axis."""

    def __init__(self, index: int) -> None:
        self._index = index

    def index(self, axis: str) -> int:
        """Return the coordinate."""
        return self._index


def _args(shape: tuple[int, ...], batch_dim: int = 0, rows: int = 1, p: float = 0.3) -> DropoutArgs:
    rng = torch.tensor([2**40 + 11, 2**33 + 3, 5])
    return DropoutArgs(torch.randn(shape), rng, p, 7, batch_dim, rows)


def _expected(args: DropoutArgs, comm: Communicator) -> Tensor:
    return args.x * (keep(args, comm).to(args.x.dtype) / (1.0 - args.p))


CASES = [
    (_args((3, 5, 8)), OneRank()),
    (_args((3, 5, 7)), OneRank()),
    (_args((1,)), OneRank()),
    (_args((6, 9), rows=3), OneRank()),
    (_args((5, 33), batch_dim=-1), OneRank()),
    (_args((1, 4, 9), batch_dim=1), OneRank()),
    (_args((2, 9000)), OneRank()),
    (_args((2, 3, 5)).sharded(1, (), "tp", 2), Rank(1)),
    (_args((2, 3, 5)).sharded(2, (10,), "tp", 2), Rank(1)),
    (_args((2, 2, 6, 6)).sharded(1, (), "tp", 4), Rank(3)),
    (_args((4, 6), batch_dim=-1).sharded(0, (), "tp", 2), Rank(1)),
]


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("args", "comm"), CASES)
def test_the_kernel_draws_the_reference_mask(
    args: DropoutArgs, comm: Communicator, dtype: torch.dtype, instruction_set: str
) -> None:
    args = args._replace(x=args.x.to(dtype))
    found, expected = run_kernel(args, comm), _expected(args, comm)
    assert found is not None
    assert torch.equal(found == 0, expected == 0)
    # 16-bit values are scaled in float32 and rounded once; the reference rounds the scale as well.
    torch.testing.assert_close(
        found, expected, rtol=2.0**-7 if dtype != torch.float32 else 0, atol=0
    )


@needs_kernel
def test_group_numbers_beyond_32_bits_are_drawn_right(instruction_set: str) -> None:
    args = _args((2, 4096))._replace(rng=torch.tensor([1, 2, 2**22 - 1]))  # 2**34 / 4096 samples
    assert torch.equal(run_kernel(args, OneRank()), _expected(args, OneRank()))


@needs_kernel
@pytest.mark.parametrize("p", [0.0, 0.999])
def test_extreme_probabilities_agree(p: float, instruction_set: str) -> None:
    args = _args((4, 100), p=p)
    assert torch.equal(run_kernel(args, OneRank()), _expected(args, OneRank()))


@needs_kernel
def test_nan_and_inf_stay_in_dropped_places_as_in_eager(instruction_set: str) -> None:
    args = _args((2, 40))
    args.x[0] = float("nan")
    args.x[1] = float("inf")
    assert torch.equal(run_kernel(args, OneRank()).isnan(), _expected(args, OneRank()).isnan())


@pytest.mark.parametrize(
    "args",
    [
        _args((4, 6)).sharded(0, (), "tp", 2),  # the samples themselves are split
        _args((2, 6)).sharded(1, (6, 6), "tp", 2),  # two blocks
        _args((2, 4, 6)).sharded(1, (), "tp", 2).sharded(2, (), "sp", 2),
        _args((2, 3, 4), batch_dim=1),  # samples are not outermost
    ],
)
def test_splits_without_a_simple_form_are_left_to_the_reference(args: DropoutArgs) -> None:
    assert find_runs(args, OneRank()) is None
    out = spec(dropout).run(OneRank(), *args)
    assert torch.equal(out, _expected(args, OneRank()))


def test_float64_and_installs_without_kernels_take_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = _args((3, 8))
    assert run_kernel(args._replace(x=args.x.double()), OneRank()) is None
    monkeypatch.setattr(native, "_MODULES", {})
    assert dropout_runs.run_kernel(args, OneRank()) is None
    assert torch.equal(spec(dropout).run(OneRank(), *args), _expected(args, OneRank()))
