"""The fused norms on a CUDA device against float64.  The same kernels run on the host elsewhere."""

import pytest
import torch

from autoshard.ops import native
from tests.ops.norms import (
    DTYPES,
    layer_norm_truth,
    make_case,
    rms_norm_truth,
    run_layer_norm,
    run_rms_norm,
    worst_excess,
)

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
