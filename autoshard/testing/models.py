"""Tiny models for tests and for pass authors: our own GPT and six Hugging Face architectures.

Each builder returns ``(model, batch, loss)``: ``loss`` is None where the model computes its own.
Weights are drawn from ``seed``; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 96
Built = tuple[nn.Module, dict[str, Tensor], Callable[[object, object], Tensor] | None]


class Attention(nn.Module):
    """Causal self-attention with one packed projection for query, key and value."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)
        self.p = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of x (B, T, C)."""
        query, key, value = (self._heads(part) for part in self.qkv(x).split(x.shape[-1], -1))
        p = self.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=True)
        return self.drop(self.proj(mixed.transpose(1, 2).reshape(x.shape)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class Mlp(nn.Module):
    """The feed-forward half of a block."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.p = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of x (B, T, C)."""
        return F.dropout(self.down(F.gelu(self.up(x))), self.p, training=self.training)


class Block(nn.Module):
    """A pre-LN Transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention and the MLP to the residual stream x (B, T, C)."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class TinyGPT(nn.Module):
    """A GPT with learned positions and a head tied to the embedding."""

    def __init__(
        self,
        layers: int = 2,
        width: int = 32,
        heads: int = 8,
        vocab: int = VOCAB,
        length: int = 16,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (B, T, V) of token ids (B, T)."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


def token_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross entropy of logits (B, T, V) against ``batch["labels"]`` (B, T)."""
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def token_batch(size: int, length: int, vocab: int = VOCAB, seed: int = 0) -> dict[str, Tensor]:
    """Return random ids and labels; labels hold some ignored positions (-100)."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (size, length), generator=draw)
    labels = torch.randint(vocab, (size, length), generator=draw)
    labels[torch.rand(size, length, generator=draw) < 0.2] = -100
    labels[:, 0] = ids[:, 0]
    return {"ids": ids, "labels": labels}


def tiny_gpt(
    layers: int = 2,
    width: int = 32,
    heads: int = 8,
    vocab: int = VOCAB,
    *,
    batch: int = 4,
    length: int = 16,
    dropout: float = 0.0,
    tied: bool = True,
    seed: int = 0,
) -> Built:
    """Return our own tiny GPT, a batch and its loss function."""
    torch.manual_seed(seed)
    model = TinyGPT(layers, width, heads, vocab, length, dropout, tied)
    return model, token_batch(batch, length, vocab, seed), token_loss


def tiny_hf(
    kind: str,
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 8,
    kv_heads: int = 4,
    vocab: int = VOCAB,
    batch: int = 4,
    length: int = 16,
    dropout: float = 0.0,
    attention: str | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Built:
    """Return a tiny Hugging Face model by its type: gpt2, bloom, llama, mistral, opt, bert or t5.

    The labels are in the batch, so the model computes its own loss.
    """
    import transformers

    torch.manual_seed(seed)
    settings = _hf_settings(kind, layers, width, heads, kv_heads, length, dropout)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=vocab, bos_token_id=0, eos_token_id=0, pad_token_id=0, **settings
    )
    auto = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}
    build = getattr(transformers, auto.get(kind, "AutoModelForCausalLM"))
    with torch.device(device):
        model = build.from_config(config, attn_implementation=attention)
    tokens = token_batch(batch, length, vocab, seed)
    return model.train(), {"input_ids": tokens["ids"], "labels": tokens["labels"]}, None


def _hf_settings(
    kind: str, layers: int, width: int, heads: int, kv_heads: int, length: int, dropout: float
) -> dict[str, object]:
    """Return the keywords of one configuration class; each spells the same sizes its own way."""
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    llama = {
        **sizes,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 2 * width,
        "max_position_embeddings": 2 * length,
        "attention_dropout": dropout,
        "use_cache": False,
    }
    both = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    table: dict[str, dict[str, object]] = {
        "gpt2": {
            "n_layer": layers,
            "n_embd": width,
            "n_head": heads,
            "n_positions": 2 * length,
            "resid_pdrop": dropout,
            "embd_pdrop": dropout,
            "attn_pdrop": dropout,
            "use_cache": False,
        },
        "bloom": {
            "n_layer": layers,
            "hidden_size": width,
            "n_head": heads,
            "hidden_dropout": dropout,
            "attention_dropout": dropout,
            "use_cache": False,
        },
        "llama": llama,
        "mistral": {**llama, "sliding_window": length // 2},
        "opt": {
            **sizes,
            "ffn_dim": 2 * width,
            "word_embed_proj_dim": width,
            "max_position_embeddings": 2 * length,
            "dropout": dropout,
            "attention_dropout": dropout,
            "use_cache": False,
        },
        "bert": {
            **sizes,
            **both,
            "intermediate_size": 2 * width,
            "max_position_embeddings": 2 * length,
        },
        "t5": {
            "num_layers": layers,
            "num_decoder_layers": layers,
            "d_model": width,
            "d_kv": width // heads,
            "num_heads": heads,
            "d_ff": 2 * width,
            "dropout_rate": dropout,
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
    }
    return table[kind]


class TinyMLP(nn.Module):
    """Two linear layers: the smallest model that can be split, cut and sharded."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.down = nn.Linear(hidden, width)
        self.skip = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Transform each row of x (B, D)."""
        return self.skip(self.down(self.act(self.up(x))))


class TinyGated(TinyMLP):
    """A gated MLP whose first layer packs gate and value, and a learned table."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, 2 * hidden)
        self.down = nn.Linear(hidden, width)
        self.table = nn.Parameter(torch.zeros(2, width))

    def forward(self, x: Tensor) -> Tensor:
        """Transform each row of x (B, D)."""
        gate, value = self.up(x + self.table.sum(0)).chunk(2, -1)
        return self.down(self.act(gate) * value)


class TinyHeads(TinyMLP):
    """An MLP whose hidden features are three groups, each normalised by a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        """Transform each row of x (B, D)."""
        return self.down(self.up(x).unflatten(-1, (3, -1)).softmax(-1).flatten(-2))


def square_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean squared error against ``batch["y"]``."""
    return F.mse_loss(output, batch["y"])


def contrast_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss that compares the samples of a batch with each other."""
    return F.cross_entropy(output @ batch["y"].T, torch.arange(len(output)))


def detached_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss that has lost its way back to the parameters."""
    return F.mse_loss(output.detach(), batch["y"])


MLPS = {"plain": TinyMLP, "gated": TinyGated, "heads": TinyHeads}
LOSSES = {"square": square_loss, "contrast": contrast_loss, "detached": detached_loss}


def tiny_mlp(
    kind: str = "plain",
    *,
    width: int = 8,
    hidden: int = 16,
    batch: int = 4,
    loss: str = "square",
    seed: int = 0,
) -> Built:
    """Return one of ``MLPS``, a batch of rows and one of ``LOSSES``."""
    torch.manual_seed(seed)
    model = MLPS[kind](width, hidden)
    rows = {name: torch.randn(batch, width) for name in ("x", "y")}
    return model, rows, LOSSES[loss]
