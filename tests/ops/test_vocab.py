"""Embedding and cross entropy over a split vocabulary equal torch's, gradients included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from autoshard.ops.vocab import vocab_cross_entropy, vocab_embedding
from tests.passes.ranks import on_ranks

WIDTH, TOKENS = 6, 10


def padded(value: torch.Tensor, dim: int, size: int, fill: float) -> torch.Tensor:
    """Return the value with its vocabulary dim filled up to a multiple of the ranks."""
    shape = list(value.shape)
    shape[dim] = -shape[dim] % size
    return torch.cat([value, value.new_full(shape, fill)], dim)


def targets(classes: int) -> torch.Tensor:
    found = torch.randint(classes, (TOKENS,))
    found[:3] = torch.tensor([-100, 0, classes - 1])
    return found


@pytest.mark.parametrize("padding_idx", [-1, 2])
@pytest.mark.parametrize(("rows", "size"), [(12, 2), (12, 4), (13, 2), (13, 4)])
def test_embedding(rows: int, size: int, padding_idx: int) -> None:
    weight = torch.randn(rows, WIDTH, dtype=torch.float64)
    ids = torch.tensor([[0, 2, 2, rows - 1], [5, 5, 6, 7]])
    slope = torch.randn(*ids.shape, WIDTH, dtype=torch.float64)
    whole = weight.clone().requires_grad_()
    expected = torch.ops.aten.embedding(whole, ids, padding_idx)
    expected.backward(slope)
    parts = padded(weight, 0, size, 9.0).chunk(size)

    def work(comm):
        own = parts[comm.index("tp")].clone().requires_grad_()
        out = vocab_embedding(own, ids, "tp", size, padding_idx)
        out.backward(slope)
        return out.detach(), own.grad

    outs, grads = zip(*on_ranks(size, work), strict=True)
    torch.testing.assert_close(sum(outs), expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat(grads)[:rows], whole.grad, rtol=1e-12, atol=1e-12)
    assert not torch.cat(grads)[rows:].any(), "padding rows got a gradient"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("classes", "size"), [(12, 2), (12, 4), (13, 2), (13, 4), (3, 2)])
def test_cross_entropy(classes: int, size: int, smoothing: float) -> None:
    logits = 5 * torch.randn(TOKENS, classes, dtype=torch.float64)
    target = targets(classes)
    slope = torch.randn(TOKENS, dtype=torch.float64)
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, target, label_smoothing=smoothing, reduction="none")
    expected.backward(slope)
    # Padding columns hold a huge logit: a single look at one would show.
    parts = padded(logits, 1, size, 1e3).chunk(size, 1)

    def work(comm):
        own = parts[comm.index("tp")].clone().requires_grad_()
        loss, lse = vocab_cross_entropy(own, target, "tp", size, classes, -100, smoothing)
        loss.backward(slope)
        return loss.detach(), lse.detach(), own.grad

    losses, lses, grads = zip(*on_ranks(size, work), strict=True)
    for loss, lse in zip(losses, lses, strict=True):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-10, atol=1e-10)
    gathered = torch.cat(grads, 1)
    torch.testing.assert_close(gathered[:, :classes], whole.grad, rtol=1e-10, atol=1e-10)
    assert not gathered[:, classes:].any(), "padding columns got a gradient"


def test_counting_the_padding_as_vocabulary_would_be_seen() -> None:
    """Plant the fault: tell the operator that its padding columns are real."""
    logits = torch.randn(TOKENS, 13, dtype=torch.float64)
    target = targets(13)
    parts = padded(logits, 1, 2, 1.0).chunk(2, 1)

    def work(comm):
        return vocab_cross_entropy(parts[comm.index("tp")], target, "tp", 2, 14, -100, 0.0)[0]

    expected = F.cross_entropy(logits, target, reduction="none")
    assert not torch.allclose(on_ranks(2, work)[0], expected)
