"""Offloading on a CUDA device: copies are right, and training is what it is without."""

import pytest
import torch

import autoshard
from autoshard.runtime.offload import HostMemory
from autoshard.testing.models import tiny_mlp

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LENGTH = 1 << 22
PLAN = """autoshard 1
batch {{ micro_batch_size = 4 }}
zero {{ offload_optimizer = {where} }}
"""


def test_copies_there_and_back_carry_the_values_of_their_time() -> None:
    device = torch.device("cuda")
    host = HostMemory(device)
    stored = {"a": host.zeros(LENGTH, torch.float32), "b": host.zeros(LENGTH, torch.float32)}
    for step in range(5):
        for value in stored.values():
            assert value.is_pinned()
            value.add_(1.0)
        host.send(stored)
        doubled = host.copy_of("a") + host.copy_of("b")
        back = host.take(doubled)
        del doubled
        host.settle()
        assert torch.equal(back, torch.full((LENGTH,), 2.0 * (step + 1)))
    part = host.fetch(stored["a"])
    with host.stream():
        tripled = part * 3
    host.settle()
    assert torch.equal(tripled.cpu(), torch.full((LENGTH,), 15.0))


def test_an_offloaded_optimizer_trains_as_one_on_the_device_does() -> None:
    found = []
    for where in ("off", "cpu"):
        model, batch, loss = tiny_mlp()
        batch = {name: value.cuda() for name, value in batch.items()}
        engine = autoshard.parallelize(
            model.cuda(), PLAN.format(where=where), example=batch, loss=loss
        )
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        for _ in range(3):
            last = engine.forward_backward(batch)
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        kinds = {p.device.type for p in engine.parameters()}
        assert kinds == {"cuda" if where == "off" else "cpu"}
        found.append((last.cpu(), engine.full_state_dict()))
    (loss_a, a), (loss_b, b) = found
    assert torch.allclose(loss_a, loss_b, rtol=1e-6)
    assert all(torch.allclose(a[n].cpu(), b[n].cpu(), rtol=1e-5, atol=1e-7) for n in a)
