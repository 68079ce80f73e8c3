"""The engine on one CUDA device, alone and with NCCL of one rank; skipped where there is none."""

import pytest
import torch
import torch.distributed as dist

import autoshard
from autoshard.testing.models import tiny_gpt

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
PLAN = "autoshard 1\nmesh { dp = 1 }\nbatch { micro_batch_size = 2, num_microbatches = 2 }\n"


@pytest.fixture(params=["alone", "nccl"])
def group(request, tmp_path):
    """Run alone, or as the only rank of a job whose collectives are NCCL's."""
    if request.param == "alone":
        yield
        return
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(device, steps=3):
    """Return losses and last parameters of a few AdamW steps on ``device``."""
    model, batch, loss = tiny_gpt()
    batch = {name: value.to(device) for name, value in batch.items()}
    engine = autoshard.parallelize(model, PLAN, example=batch, loss=loss)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        losses.append(engine.forward_backward(batch).item())
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, engine.full_state_dict()


def test_a_device_trains_as_the_host_does(group):
    host, device = trained("cpu"), trained("cuda")
    assert device[0] == pytest.approx(host[0], rel=1e-4)
    for name, value in host[1].items():
        torch.testing.assert_close(device[1][name].cpu(), value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("offload", ("off", "cpu"))
def test_memory_is_predicted_measured_and_read_off_the_allocator(group, offload):
    model, batch, loss = tiny_gpt(width=64, heads=4)
    batch = {name: value.cuda() for name, value in batch.items()}
    plan = f"{PLAN}zero {{ offload_optimizer = {offload} }}\n"
    engine = autoshard.parallelize(model, plan, example=batch, loss=loss)
    del model
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
    for _ in range(2):
        with engine.measure_memory():
            engine.forward_backward(batch)
        optimizer.step()
        optimizer.zero_grad()
    text, stats = str(engine.report()), engine.stats()
    off = float(text.partition("predicted is ")[2].partition("%")[0])
    assert abs(off) <= 5, text
    assert 0 < stats["peak_bytes"] <= stats["cuda_bytes"]
    assert "allocated by torch.cuda" in text
    assert ("  host  " in text) == (offload == "cpu")


def test_the_host_waits_for_nothing_inside_a_step(group):
    model, batch, loss = tiny_gpt()
    batch = {name: value.cuda() for name, value in batch.items()}
    engine = autoshard.parallelize(model, PLAN, example=batch, loss=loss)
    engine.forward_backward(batch)  # the first call compares values and may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.forward_backward({name: value.cpu() for name, value in batch.items()})
    finally:
        torch.cuda.set_sync_debug_mode("default")
