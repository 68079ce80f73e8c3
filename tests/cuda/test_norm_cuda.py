"""The fused norms on a CUDA device against float64.  The same kernels run on the host elsewhere."""

import pytest
import torch

from autoshard.ops import native
from autoshard.ops.dropout import DropoutArgs, keep
from autoshard.ops.dropout_runs import run_kernel
from autoshard.ops.one_rank import OneRank
from tests.ops.norms import (
    DTYPES,
    layer_norm_truth,
    make_case,
    rms_norm_truth,
    run_layer_norm,
    run_rms_norm,
    worst_excess,
)
from tests.ops.test_bias_dropout_norm import inputs, run, truth

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(native.CUDA.module is None, reason=f"_native_cuda: {native.CUDA.reason}"),
]
HIDDEN = (1, 7, 32, 255, 768, 1000, 4096, 5120, 16_384, 65_536)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize(
    ("run", "truth"), [(run_layer_norm, layer_norm_truth), (run_rms_norm, rms_norm_truth)]
)
def test_results_equal_float64(run: object, truth: object, hidden: int, dtype: torch.dtype) -> None:
    case = make_case(70, hidden, dtype, device="cuda")
    expected = truth(case)
    for name, value in run(case).items():
        assert worst_excess(value, expected[name], 1e-5) <= 1.5, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_runs_give_the_same_bits(dtype: torch.dtype) -> None:
    case = make_case(4000, 1024, dtype, device="cuda")
    first, second = run_layer_norm(case), run_layer_norm(case)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_kernels_run_on_the_current_stream() -> None:
    case = make_case(64, 1024, device="cuda")
    expected = run_layer_norm(case)["y"]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = run_layer_norm(case)["y"]
    stream.synchronize()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [33, 768, 5120, 16_384])
def test_bias_dropout_and_norm_equal_float64(hidden: int, dtype: torch.dtype) -> None:
    given = {name: value.cuda() for name, value in inputs((2, 40, hidden), dtype).items()}
    place = DropoutArgs(None, torch.tensor([77, 5, 2]).cuda(), 0.25, 3, 0)
    found = run(given, place, OneRank())
    expected = truth(given, place, OneRank(), found["s"])
    for name, value in found.items():
        assert worst_excess(value, expected[name], 1e-5) <= 1.5, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 7), (4, 64, 128), (9001,)])
def test_dropout_draws_the_reference_mask(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, device="cuda").to(dtype)
    args = DropoutArgs(x, torch.tensor([2**40, 9, 4]).cuda(), 0.3, 1, 0)
    dropped = run_kernel(args, OneRank())
    assert torch.equal(dropped == 0, ~keep(args, OneRank()) | (x == 0))
