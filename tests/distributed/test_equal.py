"""Real gloo ranks, bit for bit: half precision as in lock step, ZeRO as plain data parallel."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import autoshard
from autoshard.testing.lockstep import adamw
from tests.distributed.equal_worker import MAX_NORM, SAMPLES, batches, build, share
from tests.distributed.launch import torchrun

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).parent / "equal_worker.py"
PRECISIONS = {"bf16": "params = bf16", "fp16": "params = fp16, loss_scale = dynamic"}


def plan(dp, stage, more="fuse { add_layer_norm = off }"):
    """Return a plan of one micro-batch, or of two where numbers are half as long."""
    count = 2 if "precision" in more else 1
    return f"""autoshard 1
mesh {{ dp = {dp} }}
batch {{ micro_batch_size = {SAMPLES // dp // count}, num_microbatches = {count} }}
zero {{ stage = {stage}, param_persistence_threshold = 0KiB }}
{more}
"""


HALF = {
    f"{name} zero{stage}": (plan(2, stage, f"precision {{ {text} }}"), MAX_NORM)
    for name, text in PRECISIONS.items()
    for stage in (1, 3)
}
FULL = {
    dp: {f"fp32 dp{dp} zero{stage}": (plan(dp, stage), None) for stage in stages}
    for dp, stages in {2: (0, 1, 2, 3), 4: (0, 3)}.items()
}


def launch(tmp_path, world, cells):
    job = torchrun(tmp_path, world, WORKER, json.dumps(cells), timeout=300)
    job.require_success()
    ranks = [job.ranks[rank] for rank in range(world)]
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0], {name: torch.load(tmp_path / f"{name}.pt") for name in cells}


def plain_data_parallel(dp, order=None):
    """Train one copy of the model on the ranks' shares, gradients added in rank order."""
    model, _ = build()
    optimizer, losses = adamw(model.parameters()), []
    for batch in batches():
        scale = (batch["labels"] != -100).sum().float().reciprocal()
        terms, sums = [], None
        for rank in order or range(dp):
            local = share(batch, rank, dp)
            logits, labels = model(local["ids"]).flatten(0, 1), local["labels"].flatten()
            loss = F.cross_entropy(logits, labels, reduction="sum") * scale
            grads = torch.autograd.grad(loss, list(model.parameters()))
            sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
            terms.append(loss.detach())
        for parameter, grad in zip(model.parameters(), sums, strict=True):
            parameter.grad = grad
        optimizer.step()
        losses.append(sum(terms[1:], terms[0]).item())
    return losses, model.state_dict()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("two"), 2, HALF | FULL[2])


@pytest.mark.parametrize("name", HALF)
def test_half_precision_computes_what_lock_step_does(two_ranks, name):
    ranks, states = two_ranks
    model, loss = build()
    expected = autoshard.lockstep(model, HALF[name][0], batches(), loss=loss, max_norm=MAX_NORM)
    assert ranks[name]["losses"] == [record.loss.item() for record in expected]
    assert ranks[name]["norms"] == [record.norm.item() for record in expected]
    assert ranks[name]["overflows"] < len(expected)
    for key, value in expected[-1].params.items():
        assert torch.equal(states[name][key], value), key
    assert ranks[name]["losses"] != ranks["fp32 dp2 zero1"]["losses"]


def assert_plain(dp, ranks, states):
    losses, state = plain_data_parallel(dp)
    for name in FULL[dp]:
        assert ranks[name]["losses"] == losses, name
        for key, value in state.items():
            assert torch.equal(states[name][key], value), (name, key)


def test_two_ranks_are_bit_equal_to_plain_data_parallel(two_ranks):
    assert_plain(2, *two_ranks)


def test_four_ranks_are_bit_equal_to_plain_data_parallel(tmp_path):
    ranks, states = launch(tmp_path, 4, FULL[4])
    assert_plain(4, ranks, states)
    _, state = plain_data_parallel(4, order=(3, 2, 1, 0))
    assert not all(torch.equal(states["fp32 dp4 zero3"][n], v) for n, v in state.items())
