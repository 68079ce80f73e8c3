"""fuse-add-layer-norm: what it fuses, what it leaves alone and says so."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autoshard.compiler.pass_base import PassContext
from autoshard.ir.capture import capture
from autoshard.mesh import Mesh
from autoshard.passes.fuse_add_layer_norm import FuseAddLayerNorm, count_sites
from autoshard.plan import FuseBlock, Plan
from autoshard.testing.models import tiny_gpt

MESH = Mesh(())


def fuse(program, **settings):
    ctx = PassContext(SimpleNamespace(plan=Plan(fuse=FuseBlock(**settings))))
    FuseAddLayerNorm().run(program, ctx)
    program.forward.graph.lint()
    return ctx.remarks


def captured(model, *args):
    return capture(model, args, lambda out, batch: out.square().mean(), mesh=MESH, compare=False)


def run(program, model, *args):
    values = {**dict(model.named_parameters()), **{str(i): a for i, a in enumerate(args)}}
    inputs = [values[port.name] for port in program.forward.inputs]
    return program.forward.module()(*inputs)[0]


class PreNorm(nn.Module):
    """x + w feeds a norm and the next residual."""

    def __init__(self, shape=(8,), affine=True, alpha=1):
        super().__init__()
        self.norm = nn.LayerNorm(shape, elementwise_affine=affine)
        self.alpha = alpha

    def forward(self, x, y):
        s = torch.add(x, y, alpha=self.alpha)
        return s + self.norm(s)


@pytest.mark.parametrize("affine", [True, False])
def test_a_sum_that_is_used_again_is_fused_once_and_gives_the_same_numbers(affine):
    """Case F1."""
    model = PreNorm(affine=affine).double()
    x, y = torch.randn(2, 3, 8).double(), torch.randn(2, 3, 8).double()
    program = captured(model, x, y)
    before = run(program, model, x, y)
    remarks = fuse(program)
    assert count_sites(program.forward) == 1
    assert [r.kind for r in remarks] == ["applied"]
    adds = program.forward.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert len(adds) == 1  # the next residual; the fused add is gone
    torch.testing.assert_close(run(program, model, x, y), before, rtol=1e-12, atol=0)


def test_every_pre_norm_site_of_a_gpt_but_the_first_is_fused():
    model, batch, loss = tiny_gpt(layers=2)
    program = capture(model, batch, loss, mesh=MESH, compare=False)
    remarks = fuse(program)
    assert count_sites(program.forward) == 4
    assert [r.message for r in remarks if r.kind == "missed"] == [
        "the add broadcasts [16, 32] to [4, 16, 32]"
    ]


def test_a_second_run_changes_nothing():
    model, batch, loss = tiny_gpt(layers=1)
    program = capture(model, batch, loss, mesh=MESH, compare=False)
    fuse(program)
    text = str(program.forward.graph)
    fuse(program)
    assert str(program.forward.graph) == text


class TwoNorms(PreNorm):
    """One sum goes to two norms."""

    def __init__(self):
        super().__init__()
        self.other = nn.LayerNorm(8)

    def forward(self, x, y):
        s = x + y
        return self.norm(s) + self.other(s)


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [
        (PreNorm(alpha=2), (2, 3, 8), "the add scales its second term"),
        (PreNorm(shape=(3, 8)), (2, 3, 8), "the norm is over the last 2 dimensions"),
    ],
)
def test_a_look_alike_is_left_alone_with_the_reason(model, shape, reason):
    """Case F3, and its kind."""
    program = captured(model, torch.randn(shape), torch.randn(shape))
    remarks = fuse(program)
    assert count_sites(program.forward) == 0
    assert [(r.kind, r.message) for r in remarks] == [("missed", reason)]


def test_a_sum_for_two_norms_is_fused_with_the_first_only():
    program = captured(TwoNorms(), torch.randn(2, 8), torch.randn(2, 8))
    remarks = fuse(program)
    assert count_sites(program.forward) == 1
    assert [r.kind for r in remarks] == ["applied", "missed"]


def test_off_and_only_are_obeyed():
    model, batch, loss = tiny_gpt(layers=2)
    program = capture(model, batch, loss, mesh=MESH, compare=False)
    assert fuse(program, add_layer_norm="off") == []
    assert count_sites(program.forward) == 0
    fuse(program, only=("h.1.*",))
    assert count_sites(program.forward) == 2
