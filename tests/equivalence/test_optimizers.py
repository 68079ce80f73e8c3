"""Every elementwise optimizer steps flat shards as it steps the plain model's tensors."""

import copy

import pytest
import torch

from autoshard.ir.batch import batch_leaves, share_leaves
from autoshard.ir.promote import promote_values
from autoshard.runtime.optimizer_check import ELEMENTWISE
from autoshard.testing.equivalence import held_values
from autoshard.testing.lockstep import run_lockstep
from tests.bank.odd import odd
from tests.equivalence.test_prefetch import DP, compiled

STEPS, KIND = 3, "tied"


class Momentum(torch.optim.Optimizer):
    """Signs of a running mean, smoothed: an optimizer of a user's own."""

    def __init__(self, params, lr, by_norm=False):
        super().__init__(params, {"lr": lr, "by_norm": by_norm})

    @torch.no_grad()
    def step(self, closure=None):
        """Move every element by its own mean."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.1)
                size = mean.norm() if group["by_norm"] else 0.01
                p.sub_(torch.tanh(mean / (size + 1e-12)), alpha=group["lr"])


MAKERS = {kind.__name__: lambda ps, kind=kind: kind(ps, lr=1e-2) for kind in ELEMENTWISE}
MAKERS |= {
    "SGD, momentum": lambda ps: torch.optim.SGD(ps, 1e-2, momentum=0.9, nesterov=True),
    "AdamW, foreach": lambda ps: torch.optim.AdamW(ps, 1e-2, foreach=True, amsgrad=True),
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, 1e-2, fused=True),
    "a user's": lambda ps: Momentum(ps, 1e-2),
}


def stepped(make, stage):
    """Return the parameters after training on shards, whole."""
    model, batch, _ = odd(KIND, 2 * DP)
    program = compiled(KIND, stage, "medium")
    values = held_values(model, program, torch.float64)
    shares = share_leaves(promote_values(batch_leaves(batch), torch.float64), DP)
    return run_lockstep(program, values, [shares] * STEPS, optimizer=make)[-1].params


def plainly(make):
    """Return the parameters after training the plain model on the whole batch."""
    model, batch, loss = odd(KIND, 2 * DP)
    model = copy.deepcopy(model).double()
    optimizer = make(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model(batch["ids"]), batch).backward()
        optimizer.step()
    return dict(model.named_parameters())


def worst(ours, theirs):
    return max((ours[n] - p).abs().max().item() for n, p in theirs.items())


@pytest.mark.parametrize("name", MAKERS)
def test_it_steps_shards_as_it_steps_whole_tensors(name):
    stage = 1 + list(MAKERS).index(name) % 3
    assert worst(stepped(MAKERS[name], stage), plainly(MAKERS[name])) < 1e-9


def test_one_that_needs_whole_tensors_would_be_seen():
    def by_norm(parameters):
        return Momentum(parameters, 1e-2, by_norm=True)

    assert worst(stepped(by_norm, 3), plainly(by_norm)) > 1e-5
