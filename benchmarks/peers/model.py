"""The GPT that every peer and we train, its batches, and its loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.config import LEARNING_RATE, Size


class Embed(nn.Module):
    """Token and position embeddings."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.wte = nn.Embedding(size.vocab, size.width)
        self.wpe = nn.Embedding(size.length, size.width)

    def forward(self, ids: Tensor) -> Tensor:
        """Return vectors (B, T, C) of token ids (B, T)."""
        return self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))


class Attention(nn.Module):
    """Causal self-attention; the number of heads follows from the width it finds."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.width // size.heads
        self.q = nn.Linear(size.width, size.width)
        self.k = nn.Linear(size.width, size.width)
        self.v = nn.Linear(size.width, size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of x (B, T, C)."""
        q, k, v = (self._heads(layer(x)) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class Mlp(nn.Module):
    """The feed-forward half of a block."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of x (B, T, C)."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A pre-LN Transformer block."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(size.width)
        self.attn = Attention(size)
        self.ln_2 = nn.LayerNorm(size.width)
        self.mlp = Mlp(size)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention and the MLP to the residual stream x (B, T, C)."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Embeddings, blocks, a last norm and a head of its own."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = Embed(size)
        self.h = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.ln_f = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (B, T, V) of token ids (B, T)."""
        x = self.embed(ids)
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


def build_model(size: Size) -> GPT:
    """Return the model with the first values that all share."""
    torch.manual_seed(0)
    return GPT(size)


def global_batch(size: Size, number: int) -> tuple[Tensor, Tensor]:
    """Return ids and labels (B, T) of step ``number``: every token of them counts."""
    draw = torch.Generator().manual_seed(1000 + number)
    tokens = torch.randint(size.vocab, (size.batch, size.length + 1), generator=draw)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def local_batch(size: Size, number: int, index: int, count: int) -> tuple[Tensor, Tensor]:
    """Return part ``index`` of ``count`` of the global batch."""
    ids, labels = global_batch(size, number)
    return ids.chunk(count)[index], labels.chunk(count)[index]


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of logits (B, T, V) against labels (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def adamw(parameters: list[nn.Parameter] | list[dict]) -> torch.optim.Optimizer:
    """Return the optimizer that all use."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
