"""Twenty steps on real gloo ranks follow the plain model in one process, in float32."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from autoshard.ir.batch import compute
from autoshard.testing.plans import Layout
from tests.distributed.launch import torchrun
from tests.distributed.train_worker import KEPT, MAX_NORM, adamw, batches, build

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).parent / "train_worker.py"
STEPS = 20
CELLS = {
    2: (
        ("tiny_gpt", Layout(tp=2, sequence=True)),
        ("gpt2", Layout(pp=2, microbatches=4)),
        ("llama", Layout(dp=2, zero=3, microbatches=2)),
        ("bloom", Layout(dp=2, zero=2, microbatches=2)),
    ),
    4: (
        ("gpt2", Layout(pp=2, tp=2, microbatches=2)),
        ("bloom", Layout(dp=2, tp=2, zero=3, sequence=True)),
        ("tiny_gpt", Layout(dp=2, pp=2, zero=1, microbatches=4)),
        ("gpt2", Layout(dp=4, shard=2, zero=3, microbatches=2)),
        (KEPT, Layout(tp=4)),
    ),
}


def train_plainly(family, layout):
    model, example, loss_of = build(family, layout.samples)
    model.train()
    optimizer = adamw(model.parameters())
    losses, norms = [], []
    for batch in batches(example, STEPS, layout.samples):
        loss = loss_of_model(model, batch, loss_of)
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return losses, norms, loss_of_model(model, batch, loss_of).item(), model.state_dict()


def loss_of_model(model, batch, loss_of):
    return compute(model, loss_of, batch)[1][""]


@pytest.mark.parametrize("world", CELLS)
def test_twenty_steps_follow_the_plain_model(tmp_path, world):
    cells = [(family, asdict(layout)) for family, layout in CELLS[world]]
    job = torchrun(tmp_path, world, WORKER, STEPS, json.dumps(cells), timeout=500)
    job.require_success()
    for family, layout in CELLS[world]:
        name = f"{family} {layout}"
        losses, norms, final, state = train_plainly(family, layout)
        ran = [job.ranks[rank][name] for rank in range(world)]
        assert all(rank == ran[0] for rank in ran), f"{name}: ranks differ"
        # Rank 0 compiled for all: processes find one key, also for Hugging Face's models.
        sent = [job.ranks[rank][f"{name} sent"] for rank in range(world)]
        assert sent == [False] + [True] * (world - 1), name
        assert ran[0]["losses"] == pytest.approx(losses, rel=1e-5), name
        assert ran[0]["norms"] == pytest.approx(norms, rel=1e-4), name
        assert ran[0]["final"] == pytest.approx(final, rel=1e-5), name
        trained = torch.load(tmp_path / f"{name}.pt")
        assert list(trained) == list(state), name
        for key, value in state.items():
            assert torch.allclose(trained[key], value, atol=1e-4), f"{name}: {key}"
