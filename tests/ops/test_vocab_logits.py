"""A logsumexp and a gather over split logits equal torch's, gradients included."""

from __future__ import annotations

import pytest
import torch

from autoshard.ops.vocab_logits import vocab_gather, vocab_logsumexp
from tests.ops.test_vocab import TOKENS, padded
from tests.passes.ranks import on_ranks

SIZES = [(12, 2), (12, 4), (13, 2), (13, 4), (3, 2)]


def parts(logits: torch.Tensor, size: int, comm) -> torch.Tensor:
    """Return a rank's columns; padding holds a huge logit, a single look at which would show."""
    return padded(logits, 1, size, 1e3).chunk(size, 1)[comm.index("tp")].clone().requires_grad_()


def check(outs: tuple, grads: tuple, whole: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare every rank's result, and the gradients of all columns together."""
    for out in outs:
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    gathered = torch.cat(grads, 1)
    torch.testing.assert_close(gathered[:, : whole.shape[1]], whole.grad, rtol=1e-10, atol=1e-10)
    assert not gathered[:, whole.shape[1] :].any(), "padding columns got a gradient"


@pytest.mark.parametrize(("classes", "size"), SIZES)
def test_logsumexp(classes: int, size: int) -> None:
    whole = (5 * torch.randn(TOKENS, classes, dtype=torch.float64)).requires_grad_()
    slope = torch.randn(TOKENS, dtype=torch.float64)
    expected = whole.logsumexp(-1)
    expected.backward(slope)

    def work(comm):
        own = parts(whole.detach(), size, comm)
        out = vocab_logsumexp(own, "tp", size, classes)
        out.backward(slope)
        return out.detach(), own.grad

    check(*zip(*on_ranks(size, work), strict=True), whole, expected.detach())


@pytest.mark.parametrize(("classes", "size"), SIZES)
def test_gather(classes: int, size: int) -> None:
    whole = torch.randn(TOKENS, classes, dtype=torch.float64, requires_grad=True)
    index = torch.randint(classes, (TOKENS, 4))
    index[0] = torch.tensor([0, classes - 1, 0, classes - 1])
    slope = torch.randn(TOKENS, 4, dtype=torch.float64)
    expected = whole.gather(-1, index)
    expected.backward(slope)

    def work(comm):
        own = parts(whole.detach(), size, comm)
        out = vocab_gather(own, index, "tp", size)
        out.backward(slope)
        return out.detach(), own.grad

    outs, grads = zip(*on_ranks(size, work), strict=True)
    check((sum(outs),), grads, whole, expected.detach())


def test_padding_that_counts_would_be_seen() -> None:
    """Plant the fault: tell the operator that its padding columns are real."""
    whole = torch.randn(TOKENS, 13, dtype=torch.float64)

    def work(comm):
        return vocab_logsumexp(parts(whole, 2, comm), "tp", 2, 14).detach()

    assert not torch.allclose(on_ranks(2, work)[0], whole.logsumexp(-1))
