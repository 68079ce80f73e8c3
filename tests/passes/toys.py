"""Small models for the tests of the lowering passes: each raises one difficulty."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from autoshard.ops import add_layer_norm, add_rms_norm  # noqa: F401  (registers the ops)

VOCAB, WIDTH, LENGTH = 23, 16, 6


class Block(nn.Module):
    """A pre-norm Transformer block with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, mask=None, rotary=None):
        """Return x after attention and feed-forward."""
        batch, length, width = x.shape
        parts = self.qkv(self.ln(x)).chunk(3, -1)
        q, k, v = (p.view(batch, length, 2, -1).transpose(1, 2) for p in parts)
        if rotary is not None:
            q, k = q * rotary[0] + rotary[1], k * rotary[0] + rotary[1]
        causal = mask is None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(x)))


class Gpt(nn.Module):
    """Blocks between an embedding and a head, tied or not, with masks and rotary tables."""

    def __init__(self, blocks=3, tied=True, masked=False, rotary=False, skip=False) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(blocks))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.emb.weight
        self.masked, self.skip = masked, skip
        if rotary:
            angles = torch.arange(LENGTH).unsqueeze(1) * torch.arange(WIDTH // 2) / 7
            self.register_buffer("angles", angles)
        else:
            self.angles = None

    def forward(self, ids, target):
        """Return the summed loss."""
        first = x = self.emb(ids)
        mask = rotary = None
        if self.masked:
            places = torch.arange(ids.shape[1])
            mask = (places[:, None] >= places[None, :]) & (ids != 3)[:, None, None, :]
            mask = mask | torch.eye(ids.shape[1], dtype=torch.bool)
        if self.angles is not None:
            rotary = (self.angles.cos(), self.angles.sin())
        for block in self.h:
            x = block(x, mask, rotary)
        if self.skip:
            x = x + first.square()
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / 8


class TwiceOnOnePath(nn.Module):
    """x W W: one weight used twice on one path."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.w = nn.Parameter(torch.randn(2, 2))

    def forward(self, x, target):
        """Return the sum of x W W."""
        return (self.first(x) @ self.w @ self.w * target).sum()


class Skip(nn.Module):
    """A value of the first layer is used by the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, target):
        """Return a loss in which layer c reads what a gave, past b."""
        a = self.a(x).tanh()
        b = self.b(a).tanh()
        return ((self.c(b) + a.transpose(0, 1).transpose(0, 1)) * target).square().sum()


def token_batch(samples: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and targets."""
    shape = (samples, LENGTH)
    return torch.randint(0, VOCAB, shape), torch.randint(0, VOCAB, shape)


class PermutedHidden(nn.Module):
    """What crosses between a and b is laid out permuted in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(3, 3)

    def forward(self, x, target):
        """Return a loss of b(a(x^T)^T)."""
        hidden = self.a(x.transpose(1, 2)).transpose(1, 2).tanh()
        return (self.b(hidden) * target).sum()


class Frozen(nn.Module):
    """Layer a and the bias of b are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.a.requires_grad_(False)
        self.b.bias.requires_grad_(False)

    def forward(self, x, target):
        """Return the loss of three layers in a row."""
        return (self.c(self.b(self.a(x)).tanh()) * target).sum()


class JoinedNorm(nn.Module):
    """The fused residual add + norm, LayerNorm or RMSNorm."""

    def __init__(self, rms: bool) -> None:
        super().__init__()
        self.rms = rms
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x, residual):
        """Return the normed sum and the sum."""
        ops = torch.ops.autoshard
        if self.rms:
            return ops.add_rms_norm(x, residual, self.weight, 1e-5)[:2]
        return ops.add_layer_norm(x, residual, self.weight, None, 1e-5)[:2]


class FusedNorms(nn.Module):
    """Layers joined by fused residual adds and norms."""

    def __init__(self, rms: bool = False) -> None:
        super().__init__()
        self.rms = rms
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm_b, self.norm_c = JoinedNorm(rms), JoinedNorm(rms)

    def forward(self, x, target):
        """Return the loss of three layers with a residual stream."""
        first = self.a(x)
        y, stream = self.norm_b(first, x + first)
        y, stream = self.norm_c(self.b(y), stream)
        return ((self.c(y) + stream) * target).square().sum()


class Rms(nn.Module):
    """A norm whose decomposition changes a value in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, target):
        """Return the loss of a norm and a layer."""
        return (self.fc(self.norm(x)) * target).sum()


class WeightElsewhere(nn.Module):
    """Weights read outside their modules: a head by function, a penalty, one behind a detach."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.h = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.cut_off = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids, target):
        """Return cross entropy plus a penalty, weighted so that four batches sum to a whole."""
        x = self.emb(ids)
        for layer in self.h:
            x = layer(x).tanh()
        x = x + self.cut_off(x).detach()
        logits = F.linear(x, self.emb.weight).flatten(0, 1)
        return F.cross_entropy(logits, target.flatten()) + self.h[0].weight.square().sum()
