"""The fused norms against float64: every dtype, instruction set, odd sizes, hard rows."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autoshard.ops import add_layer_norm, add_rms_norm, native
from tests.ops.norms import (
    DTYPES,
    EPS,
    Case,
    layer_norm_truth,
    make_case,
    rms_norm_truth,
    run_layer_norm,
    run_rms_norm,
    worst_excess,
)

NORMS = [(run_layer_norm, layer_norm_truth), (run_rms_norm, rms_norm_truth)]
# Around the group sizes 8, 16 and 32 of the vector code, odd ones, and the largest.
HIDDEN = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65, 100, 257, 768, 1023, 4099)


def _assert_right(found: dict[str, Tensor], truth: dict[str, Tensor], allowed: float = 1.0) -> None:
    for name, value in found.items():
        # Sums over many rows meet the accumulation error of each.
        assert worst_excess(value, truth[name]) <= allowed, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("run", "truth"), NORMS)
def test_results_equal_float64_for_every_hidden_size(
    run: object, truth: object, dtype: torch.dtype, instruction_set: str
) -> None:
    for hidden in HIDDEN:
        case = make_case(5, hidden, dtype)
        # One element has no variance: its gradient is what rounding leaves of a difference.
        _assert_right(run(case), truth(case), allowed=30.0 if hidden == 1 else 1.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_equal_float64_for_the_largest_hidden_size(
    dtype: torch.dtype, instruction_set: str
) -> None:
    case = make_case(2, 65_536, dtype)
    _assert_right(run_layer_norm(case), layer_norm_truth(case), allowed=1.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("run", "truth"), NORMS)
def test_many_rows_are_split_and_summed_right(
    run: object, truth: object, dtype: torch.dtype, instruction_set: str
) -> None:
    case = make_case(1031, 48, dtype)
    _assert_right(run(case), truth(case), allowed=1.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_stored_sum_has_the_bits_of_an_eager_add(
    dtype: torch.dtype, instruction_set: str
) -> None:
    case = make_case(7, 77, dtype)
    assert torch.equal(run_layer_norm(case)["s"], case.x + case.residual)
    assert torch.equal(run_rms_norm(case)["s"], case.x + case.residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("offset", "spread"), [(0.0, 1.0), (1000.0, 1.0), (0.0, 1e-4), (8.0, 0.1)])
def test_error_is_no_larger_than_eager_on_easy_and_hard_rows(
    offset: float, spread: float, dtype: torch.dtype, instruction_set: str
) -> None:
    case = make_case(64, 1000, dtype, offset=offset, spread=spread)
    truth = layer_norm_truth(case)["y"]
    ours = run_layer_norm(case)["y"].double()
    total = case.x + case.residual
    eager = torch.nn.functional.layer_norm(total, (1000,), case.weight, case.bias, EPS).double()
    # One unit in the last place of the largest result, where both errors are of that size.
    floor = 1.2e-7 * float(truth.abs().max())
    assert float((ours - truth).abs().max()) <= float((eager - truth).abs().max()) + floor


def test_weight_gradients_in_bfloat16_are_off_by_less_than_three_thousandths() -> None:
    case = make_case(2048, 64, torch.bfloat16)
    found, truth = run_layer_norm(case), layer_norm_truth(case)
    for name in ("dweight", "dbias"):
        error = (found[name].double() - truth[name]).abs().max() / truth[name].abs().max()
        assert float(error) <= 3e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_parameters_and_without_a_second_gradient(
    dtype: torch.dtype, instruction_set: str
) -> None:
    case = replace(make_case(6, 40, dtype, affine=False), ds=None)
    _assert_right(run_layer_norm(case), layer_norm_truth(case), allowed=1.5)
    _assert_right(run_rms_norm(case), rms_norm_truth(case), allowed=1.5)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_float32_parameters_beside_16_bit_activations(
    dtype: torch.dtype, instruction_set: str
) -> None:
    case = make_case(40, 50, dtype)
    case = replace(case, weight=case.weight.float() + 1e-3, bias=case.bias.float())
    found = run_layer_norm(case)
    assert found["dweight"].dtype == found["dbias"].dtype == torch.float32
    _assert_right(found, layer_norm_truth(case), allowed=1.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_spread_as_in_eager(
    poison: float, dtype: torch.dtype, instruction_set: str
) -> None:
    case = make_case(4, 37, dtype)
    case.x[1, 5] = poison
    case.residual[2, 36] = poison
    total = case.x + case.residual
    eager = torch.nn.functional.layer_norm(total, (37,), case.weight, case.bias, EPS)
    rms = torch.nn.functional.rms_norm(total, (37,), case.weight, EPS)
    assert torch.equal(run_layer_norm(case)["y"].isnan(), eager.isnan())
    assert torch.equal(run_rms_norm(case)["y"].isnan(), rms.isnan())
    assert torch.equal(run_layer_norm(case)["dx"].isnan().any(-1), eager.isnan().any(-1))


@pytest.mark.parametrize("bits", [0x7FFF, 0xFFFF, 0x7F81, 0xFF81])
def test_a_bfloat16_nan_of_any_payload_stays_one(bits: int, instruction_set: str) -> None:
    case = make_case(3, 64, torch.bfloat16)
    pattern = bits - (1 << 16) if bits >= 1 << 15 else bits
    case.x.view(torch.int16)[1, 3] = pattern
    case.weight.view(torch.int16)[9] = pattern
    found = run_layer_norm(case)
    assert found["s"].isnan().sum() == 1
    assert found["y"][1].isnan().all()
    assert found["y"][:, 9].isnan().all()
    assert found["dx"].isnan().all()


def test_a_float32_weight_that_is_nan_in_its_last_bit_stays_one(instruction_set: str) -> None:
    case = make_case(2, 32, torch.bfloat16)
    weight = case.weight.float()
    weight.view(torch.int32)[4] = 0x7FFFFFFF
    case = replace(case, weight=weight, bias=case.bias.float())
    assert run_layer_norm(case)["y"][:, 4].isnan().all()


def test_values_that_overflow_a_half_become_infinite(instruction_set: str) -> None:
    x = torch.full((1, 16), 60_000.0, dtype=torch.float16)
    _, s, _, _ = add_layer_norm.forward(x, x, None, None, EPS)
    assert s.isinf().all()


def test_subnormal_halves_survive(instruction_set: str) -> None:
    x = (torch.arange(40) * 2.0**-24).half()[None]
    _, s, _ = add_rms_norm.forward(x, torch.zeros_like(x), None, EPS)
    assert torch.equal(s, x)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_no_rows_give_empty_results_and_zero_parameter_gradients(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    weight = torch.ones(8)
    y, s, mean, rstd = add_layer_norm.forward(x, x, weight, weight, EPS)
    dx, dweight, dbias = add_layer_norm.backward(x, None, s, mean, rstd, weight, True)
    assert y.shape == s.shape == dx.shape == shape
    assert torch.equal(dweight, torch.zeros(8))
    assert torch.equal(dbias, torch.zeros(8))


def test_one_row_without_a_row_dimension_works() -> None:
    case = make_case(1, 20)
    flat = Case(case.x[0], case.residual[0], case.weight, case.bias, case.dy[0], case.ds[0])
    expected = run_layer_norm(case)
    for name, value in run_layer_norm(flat).items():
        assert torch.equal(value, expected[name].reshape(value.shape)), name


def test_strided_inputs_give_the_results_of_contiguous_ones() -> None:
    case = make_case(6, 24)
    strided = Case(
        case.x.t().contiguous().t(),
        case.residual.repeat(1, 2)[:, :24],
        case.weight.repeat_interleave(2)[::2],
        case.bias.repeat_interleave(3)[::3],
        case.dy.t().contiguous().t(),
        case.ds.flip(0).flip(0),
    )
    expected = run_layer_norm(case)
    for name, value in run_layer_norm(strided).items():
        assert value.is_contiguous()
        assert torch.equal(value, expected[name]), name


def test_storage_that_starts_off_alignment_gives_the_same_bits(instruction_set: str) -> None:
    case = make_case(5, 64)
    shifted = torch.empty(case.x.numel() + 1)[1:].view_as(case.x).copy_(case.x)
    assert torch.equal(run_layer_norm(replace(case, x=shifted))["y"], run_layer_norm(case)["y"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    case = make_case(1000, 256, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = run_layer_norm(case)
    torch.set_num_threads(3)
    together = run_layer_norm(case)
    torch.set_num_threads(before)
    for name, value in alone.items():
        assert torch.equal(value, together[name]), name


@pytest.mark.parametrize(("rows", "dtype"), [(4500, torch.float32), (9000, torch.bfloat16)])
def test_results_larger_than_the_cache_have_the_bits_of_small_ones(
    rows: int, dtype: torch.dtype, instruction_set: str
) -> None:
    # Above 32 MiB results are written past the cache; every row must still be that of a small call.
    x = torch.randn(rows, 1024).to(dtype)
    y, s, mean, rstd = add_layer_norm.forward(x, x, None, None, EPS)
    dx, _, _ = add_layer_norm.backward(x, None, s, mean, rstd, None, False)
    part = slice(rows - 70, rows)
    y1, s1, mean1, rstd1 = add_layer_norm.forward(x[part], x[part], None, None, EPS)
    dx1, _, _ = add_layer_norm.backward(x[part], None, s1, mean1, rstd1, None, False)
    assert torch.equal(y[part], y1)
    assert torch.equal(s[part], s1)
    assert torch.equal(dx[part], dx1)


def test_float64_takes_the_reference_and_half_precision_the_kernel() -> None:
    assert not native.has_kernel(torch.zeros(1, dtype=torch.float64))
    assert native.has_kernel(torch.zeros(1)) == (native.CPU.module is not None)


def test_without_the_compiled_library_the_reference_gives_the_same_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case(9, 33, torch.bfloat16)
    compiled = run_layer_norm(case)
    monkeypatch.setattr(native, "_MODULES", {})
    for name, value in run_layer_norm(case).items():
        assert value.dtype == compiled[name].dtype
        assert worst_excess(value, compiled[name].double(), 2.0**-7) <= 1.0, name
