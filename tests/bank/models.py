"""Models of the case bank that no library has: each shows one habit of real code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.testing.models import VOCAB, Built, token_batch, token_loss


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of x (B, H, T, D) by angles of cosine and sine (T, D)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Rope(nn.Module):
    """The rotary table of some positions, made anew in each call."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 100.0 ** (-torch.arange(0, size, 2) / size))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.outer(positions.float(), self.inv_freq).repeat(1, 2)
        return angles.cos(), angles.sin()


class RotaryBlock(nn.Module):
    """Attention with rotary positions, and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self._inputs())
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))

    def _inputs(self) -> tuple[nn.Module, ...]:
        return self.q, self.k, self.v


class RotaryToy(nn.Module):
    """The Toy with rotary positions, from one module that is called for every block.

    With ``table`` cos and sin are one buffer that all blocks read.
    """

    def __init__(self, table: bool, width: int = 32, heads: int = 4, length: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.rope = None if table else Rope(width // heads)
        self.blocks = nn.ModuleList(RotaryBlock(width, heads) for _ in range(4))
        self.head = nn.Linear(width, VOCAB)
        cos, sin = Rope(width // heads)(torch.arange(length))
        if table:
            self.register_buffer("table", torch.stack((cos, sin)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            tables = self.table if self.rope is None else self.rope(torch.arange(ids.shape[1]))
            x = block(x, *tables)
        return self.head(x)


def rotary_toy(table: bool) -> Built:
    """Return a RotaryToy, its batch and loss."""
    torch.manual_seed(0)
    return RotaryToy(table), token_batch(4, 16), token_loss


class Router(nn.Module):
    """Picks an expert embedding by what the first half computes: an integer, and a mask of it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.bias = nn.Embedding(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        choice, is_sure = x.argmax(-1), x.amax(-1, keepdim=True) > 0.5
        return self.second(torch.where(is_sure, x, x + self.bias(choice)))


class SkipToy(nn.Module):
    """Three parts in a row; what the first one makes enters the third again."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        early = self.a(x).tanh()
        return self.c(self.b(early).tanh()) + early


class FusedToy(nn.Module):
    """Self-attention of one packed layer whose names tell nothing, as in nanoGPT."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mix(x).split(x.shape[-1], dim=-1)
        q, k, v = (p.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


def square_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean squared error against ``batch["y"]``."""
    return (output - batch["y"]).pow(2).mean()


def rows(model: nn.Module, size: int = 4, *shape: int) -> Built:
    """Return a model on rows of 8 numbers (or ``shape``), their targets and the loss."""
    draw = torch.Generator().manual_seed(0)
    shape = (size, *(shape or (8,)))
    return model, {n: torch.randn(shape, generator=draw) for n in ("x", "y")}, square_loss
