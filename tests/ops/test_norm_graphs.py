"""The fused norms as graph nodes: schema, fakes, autograd, one node each way in a joint graph."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.ops import add_layer_norm, add_rms_norm  # noqa: F401 - registers the ops

OPS = torch.ops.autoshard
EPS = 1e-5
HIDDEN = 12


def _layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    y, s, _, _ = OPS.add_layer_norm(x, residual, weight, bias, EPS)
    return y, s


def _rms_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    y, s, _ = OPS.add_rms_norm(x, residual, weight, EPS)
    return y + bias, s


def _inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 3, HIDDEN), (2, 3, HIDDEN), (HIDDEN,), (HIDDEN,)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def _targets(norm: Callable[..., tuple[Tensor, Tensor]]) -> list[str]:
    """Trace loss and gradients over fake tensors and name the ops of ours in the graph."""

    def joint(*inputs: Tensor) -> list[Tensor]:
        y, s = norm(*inputs)
        loss = (y * y).sum() + (s * s * s).sum()
        return [loss, *torch.autograd.grad(loss, inputs)]

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(value) for value in _inputs(torch.float32)]
        graph = make_fx(joint)(*fakes).graph
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [target for target in targets if target.startswith("autoshard.")]


def test_add_layer_norm_is_one_node_forward_and_one_backward_in_a_joint_graph() -> None:
    expected = ["autoshard.add_layer_norm.default", "autoshard.add_layer_norm_backward.default"]
    assert _targets(_layer_norm) == expected


def test_add_rms_norm_is_one_node_forward_and_one_backward_in_a_joint_graph() -> None:
    expected = ["autoshard.add_rms_norm.default", "autoshard.add_rms_norm_backward.default"]
    assert _targets(_rms_norm) == expected


@pytest.mark.parametrize("norm", [_layer_norm, _rms_norm])
def test_gradients_of_both_results_pass_gradcheck_in_float64(
    norm: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    assert torch.autograd.gradcheck(norm, _inputs())


def test_an_unused_normalised_result_passes_the_gradient_of_the_sum_through() -> None:
    x, residual, weight, bias = _inputs()
    _, s = _layer_norm(x, residual, weight, bias)
    (s * 3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))
    assert weight.grad is None


def test_an_unused_sum_gives_the_gradient_of_plain_layer_norm() -> None:
    x, residual, weight, bias = _inputs()
    y, _ = _layer_norm(x, residual, weight, bias)
    plain = torch.nn.functional.layer_norm(x + residual, (HIDDEN,), weight, bias, EPS)
    seed = torch.randn_like(y)
    fused = torch.autograd.grad(y, [x, residual, weight, bias], seed)
    expected = torch.autograd.grad(plain, [x, residual, weight, bias], seed)
    for ours, theirs in zip(fused, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_ops_keep_the_contract_of_the_dispatcher() -> None:
    x, residual, weight, bias = _inputs(torch.float32)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(
        OPS.add_layer_norm.default, (x, residual, weight, bias, EPS), test_utils=checks
    )
    torch.library.opcheck(OPS.add_rms_norm.default, (x, residual, None, EPS), test_utils=checks)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fake_results_have_the_shapes_and_dtypes_of_the_real_ones(
    dtype: torch.dtype, has_bias: bool
) -> None:
    x, residual, weight, _ = (value.detach() for value in _inputs(dtype))
    real = OPS.add_layer_norm(x, residual, weight, None, EPS)
    fake = OPS.add_layer_norm(x.to("meta"), residual.to("meta"), weight.to("meta"), None, EPS)
    assert [_kind(value) for value in real] == [_kind(value) for value in fake]
    _, s, mean, rstd = real
    arguments = [x, residual, s, mean, rstd, weight]
    real = OPS.add_layer_norm_backward(*arguments, has_bias)
    fake = OPS.add_layer_norm_backward(*(value.to("meta") for value in arguments), has_bias)
    assert [_kind(value) for value in real] == [_kind(value) for value in fake]


def _kind(value: Tensor) -> tuple[torch.Size, torch.dtype, tuple[int, ...]]:
    return value.shape, value.dtype, value.stride()
