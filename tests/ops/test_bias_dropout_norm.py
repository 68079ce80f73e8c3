"""Bias, dropout, add and LayerNorm in one op: against float64, autograd, and as graph nodes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.compat import FakeTensorMode
from autoshard.diagnostics import OperatorError
from autoshard.ops import bias_dropout_add_layer_norm as fused
from autoshard.ops import native
from autoshard.ops.communicator import Communicator
from autoshard.ops.dropout import DropoutArgs, keep
from autoshard.ops.library import spec
from autoshard.ops.one_rank import OneRank
from tests.ops.norms import DTYPES, EPS, worst_excess
from tests.ops.test_dropout_kernel import Rank

RESULTS = ("y", "s", "mean", "rstd", "dx", "dresidual", "dinput_bias", "dweight", "dbias")
forward = spec(fused.bias_dropout_add_layer_norm).run
backward = spec(fused.backward).run


def _place(p: float = 0.25) -> DropoutArgs:
    return DropoutArgs(None, torch.tensor([77, 5, 2]), p, 3, 0)


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return summands, parameters and incoming gradients by name."""
    torch.manual_seed(sum(shape))
    hidden = shape[-1]
    drawn = {name: torch.randn(shape) for name in ("x", "residual", "dy", "ds")}
    drawn |= {name: torch.randn(hidden) for name in ("input_bias", "weight", "bias")}
    return {name: value.to(dtype) for name, value in drawn.items()}


def run(given: dict[str, Tensor], place: DropoutArgs, comm: Communicator) -> dict[str, Tensor]:
    """Return every result of the op and its backward."""
    parameters = (given["weight"], given["bias"], EPS)
    y, s, mean, rstd = forward(
        comm, given["x"], given["input_bias"], given["residual"], *parameters, *place[1:]
    )
    gradients = backward(
        comm, given["dy"], given["ds"], s, mean, rstd, given["weight"], True, True, *place[1:]
    )
    return dict(zip(RESULTS, (y, s, mean, rstd, *gradients), strict=True))


def truth(
    given: dict[str, Tensor], place: DropoutArgs, comm: Communicator, s: Tensor
) -> dict[str, Tensor]:
    """Return the results in float64; what follows the sum starts from the stored one."""
    wide = {name: value.double() for name, value in given.items()}
    found = run(wide, place, comm)
    mask = keep(place._replace(x=given["x"]), comm).double() / (1 - place.p)
    stored = s.double() - (wide["x"] + wide["input_bias"]) * mask
    again = run(wide | {"residual": stored}, place, comm)
    return again | {"s": found["s"]}


SHARDS = [
    ((2, 3, 24), DropoutArgs(None, None, 0.0, 0, 0), OneRank()),
    ((5, 40), DropoutArgs(None, None, 0.0, 0, -1), OneRank()),
    ((2, 3, 17), DropoutArgs(None, None, 0.0, 0, 0).sharded(1, (), "tp", 2), Rank(1)),
    ((70, 4, 33), DropoutArgs(None, None, 0.0, 0, 0), OneRank()),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "split", "comm"), SHARDS)
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_results_equal_float64(
    shape: tuple[int, ...],
    split: DropoutArgs,
    comm: Communicator,
    p: float,
    dtype: torch.dtype,
    instruction_set: str,
) -> None:
    given = inputs(shape, dtype)
    place = split._replace(rng=torch.tensor([77, 5, 2]), p=p, site=3)
    found = run(given, place, comm)
    expected = truth(given, place, comm, found["s"])
    for name, value in found.items():
        assert worst_excess(value, expected[name], 1e-5) <= 1.5, name


def test_the_reference_gradients_are_those_of_autograd_in_float64() -> None:
    given = inputs((3, 2, 10), torch.float64)
    place = _place()
    names = ("x", "residual", "input_bias", "weight", "bias")
    leaves = {name: given[name].clone().requires_grad_() for name in names}
    mask = keep(place._replace(x=given["x"]), OneRank()).double() / (1 - place.p)
    s = (leaves["x"] + leaves["input_bias"]) * mask + leaves["residual"]
    y = torch.nn.functional.layer_norm(s, (10,), leaves["weight"], leaves["bias"], EPS)
    expected = torch.autograd.grad([y, s], list(leaves.values()), [given["dy"], given["ds"]])
    found = run(given, place, OneRank())
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(found[f"d{name}"], gradient, rtol=1e-12, atol=1e-12)


def test_without_any_parameter(instruction_set: str) -> None:
    given = inputs((4, 20), torch.float32)
    place = _place()[1:]
    y, s, mean, rstd = forward(
        OneRank(), given["x"], None, given["residual"], None, None, EPS, *place
    )
    plain = torch.nn.functional.layer_norm(s, (20,), None, None, EPS)
    torch.testing.assert_close(y, plain, rtol=1e-5, atol=1e-5)
    _, _, *vectors = backward(
        OneRank(), given["dy"], None, s, mean, rstd, None, False, False, *place
    )
    assert [value.shape for value in vectors] == [torch.Size([0])] * 3


def test_kernel_and_reference_agree_on_dtypes_and_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs((3, 9), torch.bfloat16)
    compiled = run(given, _place(), OneRank())
    monkeypatch.setattr(native, "_MODULES", {})
    for name, value in run(given, _place(), OneRank()).items():
        assert (value.dtype, value.shape) == (compiled[name].dtype, compiled[name].shape), name


def test_a_joint_graph_has_one_node_forward_and_one_backward() -> None:
    def joint(rng: Tensor, *inputs: Tensor) -> list[Tensor]:
        x, input_bias, residual, weight, bias = inputs
        y, s, _, _ = fused.bias_dropout_add_layer_norm(
            x, input_bias, residual, weight, bias, EPS, rng, 0.1, 0, 0, 1, [], [], [], [], []
        )
        loss = (y * y).sum() + (s * s * s).sum()
        return [loss, *torch.autograd.grad(loss, inputs)]

    with FakeTensorMode():
        shapes: list[Any] = [(2, 3, 8), (8,), (2, 3, 8), (8,), (8,)]
        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
        graph = make_fx(joint)(torch.zeros(3, dtype=torch.int64), *inputs).graph
    ours = [str(node.target) for node in graph.nodes if "autoshard" in str(node.target)]
    assert ours == [
        "autoshard.bias_dropout_add_layer_norm.default",
        "autoshard.bias_dropout_add_layer_norm_backward.default",
    ]


def test_a_bias_of_another_length_is_refused() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(OperatorError, match=r"input_bias of shape \[4\] .* found f32\[3\]"):
        forward(OneRank(), x, torch.zeros(3), x, None, None, EPS, *_place()[1:])


def test_parameters_of_different_dtypes_are_refused() -> None:
    x = torch.zeros(2, 4).bfloat16()
    with pytest.raises(OperatorError, match=r"input_bias is torch.float32 but weight is torch.bf"):
        forward(OneRank(), x, torch.zeros(4), x, x[0], None, EPS, *_place()[1:])
