"""A model whose parameters are unlike a layer's: each option adds one kind."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.testing.models import Built, token_loss

VOCAB, WIDTH, LENGTH, SAMPLES = 23, 6, 5, 4


class Odd(nn.Module):
    """Layers between an embedding and a head that reads the embedding's weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if kind == "tied":
            self.head.weight = self.emb.weight
        if kind == "scalar":
            self.extra = nn.Parameter(torch.tensor(1.5))
        if kind == "empty":
            self.extra = nn.Parameter(torch.empty(0, WIDTH))
        if kind == "turned":
            self.extra = nn.Parameter(torch.randn(2 * WIDTH, WIDTH).t()[:, :WIDTH])
        if kind == "unused":
            self.extra = nn.Parameter(torch.randn(3))
        if kind == "frozen":
            for module in (self.blocks[0], self.blocks[1]):
                module.requires_grad_(False)
            self.blocks[2].bias.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (B, T, V)."""
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x).tanh()
        if self.kind == "scalar":
            x = x * self.extra
        if self.kind == "empty":
            x = x + torch.cat([self.extra, self.blocks[0].weight]).sum(0)
        if self.kind == "turned":
            x = F.linear(x, self.extra)
        if self.kind == "elsewhere":
            return F.linear(x, self.emb.weight)
        return self.head(x)


def odd(kind: str, samples: int = SAMPLES) -> Built:
    """Return the model with one kind of parameter, a batch and the loss."""
    torch.manual_seed(0)
    ids, labels = torch.randint(VOCAB, (2, samples, LENGTH))
    return Odd(kind), {"ids": ids, "labels": labels}, token_loss
