"""fuse-add-layer-norm knows a norm however it is spelled, and takes dropout and bias along."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoshard.compiler.pass_base import PassContext
from autoshard.ir.capture import capture
from autoshard.ir.evaluate import run_reference
from autoshard.mesh import Mesh
from autoshard.passes.canonicalize import Canonicalize
from autoshard.passes.fuse_add_layer_norm import FUSED, FuseAddLayerNorm
from autoshard.plan import FuseBlock, Plan
from autoshard.testing.models import tiny_gpt, tiny_hf

WIDTH = 8
ADD, RMS, DROPOUT = (op._schema.name.split("::")[1] for op in FUSED)


def llama(x, weight, eps=1e-6):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def gemma(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight)


def product(x, weight, eps=1e-6):
    return torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * x * weight


def root(x, weight, eps=1e-6):
    return x / torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + eps) * weight


def bare(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def cast(x, weight, eps=1e-6):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def torch_own(x, weight, eps=1e-6):
    return F.rms_norm(x, (WIDTH,), weight, eps)


class Residual(nn.Module):
    """A sum that feeds a norm and the next residual."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.weight = norm, nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x, y):
        s = x + y
        return s + self.norm(s, self.weight)


def captured(model, *args):
    program = capture(
        model, args, lambda out, batch: out.float().square().mean(), mesh=Mesh(()), compare=False
    )
    Canonicalize().run(program, PassContext(SimpleNamespace(plan=Plan())))
    return program


def fuse(program, **settings):
    ctx = PassContext(SimpleNamespace(plan=Plan(fuse=FuseBlock(**settings))))
    FuseAddLayerNorm().run(program, ctx)
    program.forward.graph.lint()
    return ctx.remarks


def fused(program):
    names = (n.target._schema.name.split("::")[1] for n in program.forward.graph.nodes
             if n.target in FUSED)  # fmt: skip
    return dict(Counter(names))


def evaluate(program, model, args):
    values = {**dict(model.named_parameters()), **{str(i): a for i, a in enumerate(args)}}
    inputs = [values[port.name] for port in program.forward.inputs]
    return program.forward.module()(*inputs)[0]


@pytest.mark.parametrize("norm", [llama, gemma, product, root, bare, torch_own])
def test_an_rms_norm_is_fused_however_it_is_spelled(norm):
    model = Residual(norm).double()
    args = [torch.randn(2, 3, WIDTH, dtype=torch.float64) for _ in range(2)]
    program = captured(model, *args)
    before = evaluate(program, model, args)
    assert [r.kind for r in fuse(program)] == ["applied"]
    assert fused(program) == {RMS: 1}
    assert not any("rsqrt" in n.name or "pow" in n.name for n in program.forward.graph.nodes)
    torch.testing.assert_close(evaluate(program, model, args), before, rtol=1e-12, atol=0)


def test_the_casts_around_a_norm_in_bfloat16_are_part_of_it():
    model = Residual(cast).bfloat16()
    args = [torch.randn(2, 3, WIDTH).bfloat16() for _ in range(2)]
    program = captured(model, *args)
    before = evaluate(program, model, args)
    fuse(program)
    assert fused(program) == {RMS: 1}
    torch.testing.assert_close(evaluate(program, model, args), before, rtol=2**-7, atol=0)


def leaky(x, weight, eps=1e-6):
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return x * scale * weight + scale


def over_two(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + eps) * weight


def of_another(x, weight, eps=1e-6):
    return x.tanh() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def cubed(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("norm", [leaky, over_two, of_another, cubed])
def test_what_only_looks_like_an_rms_norm_is_left_alone(norm):
    model = Residual(norm)
    program = captured(model, torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH))
    fuse(program)
    assert fused(program) == {}


def test_a_weight_that_other_values_make_is_a_reason():
    def scaled(x, weight, eps=1e-6):
        return F.layer_norm(x, (WIDTH,), weight * x.flatten()[:WIDTH].sigmoid())

    program = captured(Residual(scaled), torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH))
    assert [r.message for r in fuse(program)] == ["the norm's weight is computed from other values"]


def test_channels_last_norms_of_a_convnext_block_are_right():
    """Case F3."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.LayerNorm(WIDTH)

        def forward(self, x):
            y = (x + self.conv(x)).permute(0, 2, 3, 1)
            return x + self.norm(y).permute(0, 3, 1, 2)

    model, x = Block().double(), torch.randn(2, WIDTH, 4, 4, dtype=torch.float64)
    program = captured(model, x)
    fuse(program)
    assert fused(program) == {}
    torch.testing.assert_close(
        evaluate(program, model, [x]), model(x).float().square().mean(), rtol=1e-6, atol=0
    )


def trained(program, model, batch):
    """Return the loss and every gradient of a program that is not sharded."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = run_reference(program, tensors, batch, rng=(3, 1, 0))
    return {"loss": found.loss, **found.grads}


SITES = {
    "gpt": {DROPOUT: 4},
    "gpt2": {DROPOUT: 4},
    "bloom": {DROPOUT: 4},
    "bert": {DROPOUT: 4},
    "llama": {RMS: 4},
    "t5": {RMS: 10},
}


@pytest.mark.parametrize("family", SITES)
def test_every_site_of_a_family_is_fused_and_trains_to_the_same_numbers(family):
    """No norm whose input is an add is missed, but for embeddings that broadcast positions."""
    make = {"gpt": tiny_gpt}.get(family)
    built = make(dropout=0.1) if make else tiny_hf(family, dropout=0.1)
    model, batch, loss = built
    program = capture(model, batch, loss, mesh=Mesh(()), compare=False)
    Canonicalize().run(program, PassContext(SimpleNamespace(plan=Plan())))
    plain = trained(program, model, batch)
    remarks = fuse(program)
    assert fused(program) == SITES[family]
    missed = [r.message for r in remarks if r.kind == "missed"]
    assert all("broadcasts" in message for message in missed)
    for name, value in trained(program, model, batch).items():
        torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-6, msg=name)
