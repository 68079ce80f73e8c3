"""Complex rotary tables, Fourier mixers and unfolded windows, split and sharded, in lock step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoshard.diagnostics import InternalError
from autoshard.frontend import compile_plan
from autoshard.ir.graph_function import GraphFunction, Port
from autoshard.ir.tidy import tidy
from autoshard.proof.static import static_rows
from autoshard.proof.verdict import Status
from tests.bank.equal import assert_equal, read

aten = torch.ops.aten
PLAN = """
mesh {{ {mesh} }}
batch {{ micro_batch_size = {size}, num_microbatches = 2 }}
tensor {{ q: colwise, k: colwise, v: colwise, o: rowwise }}
zero {{ stage = {stage} }}
"""
HEADS, WIDTH = 4, 16


class ComplexRotary(nn.Module):
    """Attention whose pairs of features are turned as complex numbers, as DeepSeek-V2's are."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Attend over x (B, T, D)."""
        angles = torch.outer(torch.arange(x.shape[1]).to(x), torch.tensor([1.0, 0.1]).to(x))
        turn = torch.polar(torch.ones_like(angles), angles)

        def heads(value: Tensor) -> Tensor:
            return value.unflatten(2, (HEADS, WIDTH // HEADS)).transpose(1, 2)

        def turned(value: Tensor) -> Tensor:
            pairs = torch.view_as_complex(value.reshape(*value.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turn).flatten(3)

        q, k = turned(heads(self.q(x))), turned(heads(self.k(x)))
        y = F.scaled_dot_product_attention(q, k, heads(self.v(x)), is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Mixer(ComplexRotary):
    """The same between mixers of tokens by Fourier transforms, with a window over neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(5, WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Mix and attend over x (B, T, D), T = 8."""
        x = x + torch.fft.fftn(x, dim=(1, 2)).real / 8
        x = super().forward(x)
        spectrum = torch.fft.rfft(x, dim=1) * torch.view_as_complex(self.gate)
        x = x + torch.fft.irfft(spectrum, n=x.shape[1], dim=1)
        windows = F.unfold(x[:, None], (3, 1), padding=(1, 0))
        return x + windows.unflatten(2, (x.shape[1], WIDTH)).mean(1)


def toy(kind: type[nn.Module]) -> tuple:
    torch.manual_seed(0)
    return kind(), {"x": torch.randn(4, 8, WIDTH)}, lambda y, batch: y.square().mean()


@pytest.mark.parametrize("kind", [ComplexRotary, Mixer])
@pytest.mark.parametrize(("mesh", "size", "stage"), [("tp = 2, dp = 2", 1, 3), ("tp = 4", 2, 0)])
def test_they_train_split_as_whole(kind: type[nn.Module], mesh: str, size: int, stage: int) -> None:
    text = PLAN.format(mesh=mesh, size=size, stage=stage)
    model, batch, loss = toy(kind)
    compiled = compile_plan(model, read(text), batch, loss)
    rows = static_rows(compiled.program, compiled.plain)
    assert [str(row) for row in rows if row.status is not Status.PROVED] == []
    assert_equal(toy(kind), text)


@pytest.mark.parametrize("kind", [ComplexRotary, Mixer])
def test_complex_numbers_are_made_of_float32_in_mixed_precision(kind: type[nn.Module]) -> None:
    model, batch, loss = toy(kind)
    text = PLAN.format(mesh="dp = 2", size=1, stage=3) + "precision { compute = bf16 }"
    compiled = compile_plan(model, read(text), batch, loss)
    rows = static_rows(compiled.program, compiled.plain)
    assert [str(row) for row in rows if row.status is not Status.PROVED] == []


def changed_piece(early_view: bool) -> GraphFunction:
    """Return a graph that doubles the rows 1 to 3 of a fresh value in place, and then reads it."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    fresh = graph.call_function(aten.neg.default, (x,))
    views = [graph.call_function(aten.slice.Tensor, (fresh, 0, 0, 2))] if early_view else []
    piece = graph.call_function(aten.slice.Tensor, (fresh, 0, 1, 3))
    graph.call_function(aten.mul_.Scalar, (piece, 2.0))
    late = graph.call_function(aten.slice.Tensor, (fresh, 0, 2, 4))
    results = (fresh, late, *views)
    graph.output(results)
    for node in (x, fresh, *views, piece, late):
        node.meta["val"] = torch.empty(4)
    ports = tuple(Port("out", str(i)) for i in range(len(results)))
    return GraphFunction(graph, (Port("in", "x"),), ports)


def test_a_piece_that_is_changed_in_place_becomes_a_new_piece_and_a_new_whole() -> None:
    function = tidy(changed_piece(early_view=False))
    assert not any(n.target is aten.mul_.Scalar for n in function.graph.nodes)
    whole, late = torch.fx.GraphModule(nn.Module(), function.graph)(torch.arange(4.0))
    assert whole.tolist() == [0, -2, -4, -3] and late.tolist() == [-4, -3]


def test_a_view_that_would_keep_old_elements_is_refused() -> None:
    with pytest.raises(InternalError, match=r"the in-place operation aten\.mul_"):
        tidy(changed_piece(early_view=True))
