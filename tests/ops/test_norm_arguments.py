"""What the fused norms refuse, and with which words."""

import pytest
import torch

from autoshard.diagnostics import OperatorError
from autoshard.ops import add_layer_norm, add_rms_norm  # noqa: F401 - registers the ops

OPS = torch.ops.autoshard
X = torch.zeros(2, 4)


def test_summands_of_different_shapes_are_refused_rather_than_broadcast() -> None:
    with pytest.raises(OperatorError, match=r"x is f32\[2, 4\], residual is f32\[1, 4\]"):
        OPS.add_layer_norm(X, torch.zeros(1, 4), None, None, 1e-5)


def test_summands_of_different_dtypes_are_refused() -> None:
    with pytest.raises(OperatorError, match=r"x is torch.float32 but residual is torch.bfloat16"):
        OPS.add_rms_norm(X, X.bfloat16(), None, 1e-5)


def test_integers_are_refused() -> None:
    with pytest.raises(OperatorError, match=r"floating-point x, found int64\[2, 4\]"):
        OPS.add_layer_norm(X.long(), X.long(), None, None, 1e-5)


def test_an_empty_hidden_dimension_is_refused() -> None:
    with pytest.raises(OperatorError, match=r"normalises the last dimension"):
        OPS.add_layer_norm(torch.zeros(2, 0), torch.zeros(2, 0), None, None, 1e-5)


def test_a_weight_of_another_length_is_refused() -> None:
    with pytest.raises(OperatorError, match=r"weight of shape \[4\] .* found f32\[3\]"):
        OPS.add_layer_norm(X, X, torch.ones(3), None, 1e-5)


def test_a_weight_of_a_third_dtype_is_refused() -> None:
    with pytest.raises(OperatorError, match=r"x's dtype torch.float32 or torch.float32"):
        OPS.add_rms_norm(X, X, torch.ones(4).half(), 1e-5)


def test_weight_and_bias_of_different_dtypes_are_refused() -> None:
    x = X.bfloat16()
    with pytest.raises(OperatorError, match=r"weight is torch.float32 but bias is torch.bfloat16"):
        OPS.add_layer_norm(x, x, torch.ones(4), torch.zeros(4).bfloat16(), 1e-5)


def test_statistics_of_another_tensor_are_refused_in_backward() -> None:
    wrong = torch.zeros(2)
    with pytest.raises(OperatorError, match=r"mean is f32\[2\]"):
        OPS.add_layer_norm_backward(X, None, X, wrong, wrong, None, False)


def test_a_gradient_of_another_shape_is_refused_in_backward() -> None:
    rstd = torch.ones(2, 1)
    with pytest.raises(OperatorError, match=r"dy is f32\[4, 2\], s is f32\[2, 4\]"):
        OPS.add_rms_norm_backward(X.reshape(4, 2), None, X, rstd, None)
