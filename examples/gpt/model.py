"""A plain GPT: nothing in this file knows about parallelism.

Pre-norm blocks, learned positions, one packed query-key-value projection, a GELU MLP and a head
tied to the embedding. `build` is what `--model examples/gpt/model.py:build` calls.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Config:
    """The sizes of a GPT; the defaults train in seconds on one CPU core."""

    vocab: int = 256
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 64
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention over a packed q | k | v projection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended values, shaped like `x` (batch, tokens, width)."""
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed values, shaped like `x`."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm and added to the residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after this block."""
        x = x + self.dropout(self.attn(self.attn_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A decoder-only language model."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.apply(_initialize)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, tokens, vocab) for token ids (batch, tokens)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of `batch["targets"]` under the logits."""
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def build(
    config: Config | None = None, batch_size: int = 4, seed: int = 0
) -> tuple[GPT, Batch, Callable[[Tensor, Batch], Tensor]]:
    """Return a seeded model, one micro-batch of the shape it trains on, and its loss."""
    config = config or Config()
    torch.manual_seed(seed)
    model = GPT(config)
    tokens = torch.randint(config.vocab, (batch_size, config.context + 1))
    return model, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, next_token_loss


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
