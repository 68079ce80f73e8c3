"""One attention layer in each layout that real models pack query, key and value in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autoshard.testing.models import Built
from tests.bank.models import rows

WIDTH, DIM, LENGTH = 32, 8, 6


class HeadsToy(nn.Module):
    """Causal attention; ``layout`` says how the first layer's outputs lie.

    separate      q, k, v in layers of their own
    concatenated  all of q, all of k, all of v, taken by slices (Phi-3)
    interleaved   q, k, v of each head (BLOOM)
    grouped       for each key head its queries, then key and value (Falcon, litgpt)
    """

    def __init__(self, layout: str, heads: int = 4, kv_heads: int = 2, **habits: bool) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, kv_heads, DIM
        self.layout, self.habits = layout, habits
        self.sizes = [heads * DIM, kv_heads * DIM, kv_heads * DIM]
        if layout == "separate":
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, n) for n in self.sizes)
        else:
            self.qkv = nn.Linear(WIDTH, sum(self.sizes))
        self.o = nn.Linear(heads * DIM, WIDTH)
        if habits.get("norms"):
            self.q_norm, self.k_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        if habits.get("table"):
            self.table = nn.Embedding(2 * LENGTH, heads)
        if habits.get("shared"):
            self.shared = nn.Linear(WIDTH, DIM)
        self.slopes = nn.Buffer(2.0 ** -torch.arange(1.0, heads + 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._norm(*(part.transpose(1, 2) for part in self._parts(x)))
        k, v = self._widen(k), self._widen(v)
        scores = q @ k.transpose(-1, -2) * DIM**-0.5 + self._bias()
        if self.habits.get("shared"):
            key = self.shared(x)[:, None].expand(-1, self.num_heads, -1, -1)
            scores = scores + q @ key.transpose(-1, -2)
        mixed = scores.softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).flatten(2))

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape, groups = x.shape[:-1], self.num_key_value_heads
        if self.layout == "separate":
            parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        elif self.layout == "concatenated":
            packed, (q, k, _) = self.qkv(x), self.sizes
            parts = (packed[..., :q], packed[..., q : q + k], packed[..., q + k :])
        elif self.layout == "interleaved":
            packed = self.qkv(x).view(*shape, self.num_heads, 3, DIM)
            return packed[..., 0, :], packed[..., 1, :], packed[..., 2, :]
        else:
            each = self.num_heads // groups
            packed = self.qkv(x).view(*shape, groups, each + 2, DIM)
            q, k, v = packed.split((each, 1, 1), dim=-2)
            return q.reshape(*shape, -1, DIM), k.flatten(-3, -2), v.flatten(-3, -2)
        q, k, v = (part.view(*shape, -1, DIM) for part in parts)
        return q, k, v

    def _norm(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (self.q_norm(q), self.k_norm(k), v) if self.habits.get("norms") else (q, k, v)

    def _widen(self, x: Tensor) -> Tensor:
        batch, groups, length, dim = x.shape
        each = self.num_heads // groups
        wide = x[:, :, None].expand(batch, groups, each, length, dim)
        return wide.reshape(batch, groups * each, length, dim)

    def _bias(self) -> Tensor:
        steps = torch.arange(LENGTH)
        away = steps[None] - steps[:, None]
        mask = torch.zeros(LENGTH, LENGTH).masked_fill(away > 0, float("-inf"))
        if self.habits.get("table"):
            return mask + self.table(away + LENGTH).permute(2, 0, 1)
        if self.habits.get("alibi"):
            return mask + self.slopes[:, None, None] * away
        return mask


class ParallelToy(nn.Module):
    """Two branches side by side, whose outputs one layer reads joined."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 64)
        self.out = nn.Linear(80, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat((self.a(x).tanh(), self.b(x).relu()), dim=-1))


def heads_toy(layout: str, *sizes: int, **habits: bool) -> Built:
    """Return a HeadsToy, a batch of rows and the loss."""
    torch.manual_seed(0)
    return rows(HeadsToy(layout, *sizes, **habits), 2, LENGTH, WIDTH)
