"""Losses that users write themselves, over a vocabulary that is split, are what they are whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.frontend import compile_plan
from autoshard.ops import vocab
from autoshard.passes.canonicalize import Canonicalize
from autoshard.proof.static import static_rows
from autoshard.proof.verdict import Status
from tests.bank.equal import read
from tests.passes.tensor_parallel import TENSOR_PASSES, assert_equal, compiled, count_collectives

WIDTH = 8
PASSES = (Canonicalize(), *TENSOR_PASSES)
WEIGHTS = torch.linspace(0.5, 2.0, 97)
Loss = Callable[[Tensor, dict], Tensor]


class Words(nn.Module):
    """An embedding and a head with a bias."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, WIDTH)
        self.head = nn.Linear(WIDTH, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.wte(ids)))


def rows(logits: Tensor, batch: dict) -> tuple[Tensor, Tensor]:
    return logits.flatten(0, 1), batch["labels"].flatten()


def chosen(values: Tensor, batch: dict) -> Tensor:
    """Return each token's value at its label; an ignored one counts as word 0."""
    return values.gather(-1, batch["labels"].clamp(min=0).unsqueeze(-1)).squeeze(-1)


def plain(logits: Tensor, batch: dict) -> Tensor:
    return F.cross_entropy(*rows(logits, batch))


def weighted(logits: Tensor, batch: dict, reduction: str) -> Tensor:
    weight = WEIGHTS[: logits.shape[-1]].to(logits.dtype)
    return F.cross_entropy(*rows(logits, batch), weight=weight, reduction=reduction)


def entropy(logits: Tensor, batch: dict) -> Tensor:
    spread = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return plain(logits, batch) - 0.1 * spread.mean()


def focal(logits: Tensor, batch: dict) -> Tensor:
    log_chance = chosen(logits.log_softmax(-1), batch)
    return -((1 - log_chance.exp()) ** 2 * log_chance).mean()


def turned(logits: Tensor, batch: dict) -> Tensor:
    return F.nll_loss(logits.log_softmax(-1).transpose(1, 2), batch["labels"])


def likelihood(logits: Tensor, batch: dict) -> Tensor:
    logits, labels = rows(logits, batch)
    return F.nll_loss(F.log_softmax(logits, -1), labels)


SPLIT: dict[str, Loss] = {
    "label smoothing": lambda x, b: F.cross_entropy(*rows(x, b), label_smoothing=0.1),
    "no reduction": lambda x, b: F.cross_entropy(*rows(x, b), reduction="none").square().sum(),
    "another ignored word": lambda x, b: F.cross_entropy(
        x.flatten(0, 1), b["labels"].clamp(min=0).flatten(), ignore_index=0
    ),
    "classes in the middle": lambda x, b: F.cross_entropy(x.transpose(1, 2), b["labels"]),
    "class weights": lambda x, b: weighted(x, b, "mean"),
    "class weights, summed": lambda x, b: weighted(x, b, "sum"),
    "log-softmax and likelihood": likelihood,
    "likelihood of turned log-softmax": turned,
    "log-softmax and gather": lambda x, b: -chosen(x.log_softmax(-1), b).mean(),
    "focal": focal,
    "z-loss": lambda x, b: plain(x, b) + 0.01 * x.logsumexp(-1).square().mean(),
    "z-loss kept": lambda x, b: plain(x, b) + 0.01 * x.logsumexp(-1, keepdim=True).square().mean(),
    "capped logits": lambda x, b: plain(torch.tanh(x / 3) * 3, b),
    "scaled logits": lambda x, b: plain((x * 0.25).float(), b),
    "shifted labels": lambda x, b: F.cross_entropy(
        x[:, :-1].reshape(-1, x.shape[-1]), b["labels"][:, 1:].reshape(-1)
    ),
}  # fmt: skip
GATHERED: dict[str, Loss] = {
    "accuracy": lambda x, b: plain(x, b) + 0 * (x.argmax(-1) == b["labels"]).to(x.dtype).mean(),
    "largest": lambda x, b: plain(x, b) + 0.1 * x.max(-1).values.mean(),
    "best three": lambda x, b: plain(x, b) + 0.1 * x.topk(3, -1).values.mean(),
    "distillation": lambda x, b: F.kl_div(
        x.log_softmax(-1), F.one_hot(b["ids"], x.shape[-1]).to(x.dtype), reduction="sum"
    ),
}


def built(vocab: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(vocab, (2, 3, 4), generator=draw)
    labels[0, :2] = torch.tensor([-100, vocab - 1])
    return Words(vocab), {"ids": ids, "labels": labels}


def rules(pad: str = "") -> dict[str, str]:
    return {"wte": f"vocab{pad}", "head": f"vocab{pad}"}


def collectives_of(loss: Loss, size: int = 96) -> dict[str, int]:
    pad = "(pad=4)" if size == 97 else ""
    return count_collectives(compiled(*built(size), rules(pad), loss=loss, passes=PASSES)[0])


@pytest.mark.parametrize("name", SPLIT)
def test_a_loss_runs_on_split_logits(name: str) -> None:
    """97 words over 2 ranks, padded to 104: no rank ever holds all logits of a token."""
    program = assert_equal(*built(97), rules("(pad=4)"), loss=SPLIT[name], passes=PASSES)
    assert count_collectives(program)["all_gather"] == 0


@pytest.mark.parametrize("name", ["class weights", "z-loss", "focal", "label smoothing"])
def test_four_ranks_agree(name: str) -> None:
    assert_equal(*built(97), rules("(pad=4)"), 4, SPLIT[name])


@pytest.mark.parametrize(
    "name",
    [
        "label smoothing",
        "classes in the middle",
        "class weights",
        "log-softmax and gather",
        "focal",
        "z-loss kept",
        "capped logits",
        "shifted labels",
    ],
)
def test_a_split_loss_is_proved(name: str) -> None:
    """Three samples of three labels: extents that two ranks do not divide."""
    text = """
    mesh { dp = 2, tp = 2 }
    batch { micro_batch_size = 3, num_microbatches = 2 }
    tensor { wte: vocab(pad=4), head: vocab(pad=4) }
    """
    model, batch = built(97)
    compiled = compile_plan(model, read(text), batch, SPLIT[name])
    for row in static_rows(compiled.program, compiled.plain):
        assert row.status is Status.PROVED, str(row)


@pytest.mark.parametrize("name", GATHERED)
def test_what_needs_all_logits_gathers_them_with_a_remark(name: str) -> None:
    program = assert_equal(*built(97), rules("(pad=4)"), loss=GATHERED[name])
    assert count_collectives(program)["all_gather"] == 1
    _, ctx = compiled(*built(97), rules("(pad=4)"), loss=GATHERED[name])
    found = [r.message for r in ctx.remarks if r.kind == "missed" and "needs it whole" in r.message]
    assert any(m.startswith("gathers [3, 4, 97] S(2, 1x104): 'aten.") for m in found), found


def test_an_entropy_of_padded_logits_is_gathered_and_of_others_is_not() -> None:
    for size in (96, 97):
        pad = "(pad=4)" if size == 97 else ""
        program = assert_equal(*built(size), rules(pad), loss=entropy)
        assert count_collectives(program)["all_gather"] == (size == 97)


def test_a_likelihood_costs_no_more_than_a_cross_entropy() -> None:
    assert collectives_of(SPLIT["log-softmax and likelihood"]) == collectives_of(plain)
    assert collectives_of(SPLIT["likelihood of turned log-softmax"]) == collectives_of(plain)


def test_smoothing_over_the_padded_vocabulary_would_be_seen(monkeypatch) -> None:
    """Plant the fault: smooth over all columns a rank holds, padding included."""
    every = vocab.real_columns
    monkeypatch.setattr(vocab, "real_columns", lambda *args: every(*args[:3], 10**6))
    with pytest.raises(AssertionError):
        assert_equal(*built(97), rules("(pad=4)"), loss=SPLIT["label smoothing"])
