"""Virtual ranks on one CUDA device train as they do on the host; skipped where there is none."""

import pytest
import torch

from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.batch import batch_leaves, share_leaves
from autoshard.source import Source
from autoshard.testing.lockstep import run_lockstep
from autoshard.testing.models import tiny_gpt
from autoshard.testing.plans import Layout, plan_text

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
LAYOUTS = (
    Layout(tp=2),
    Layout(tp=2, sequence=True),
    Layout(dp=2, zero=1),
    Layout(dp=2, zero=3),
    Layout(pp=2, microbatches=2),
    Layout(dp=2, tp=2, zero=3, sequence=True),
)


@pytest.fixture(autouse=True)
def same_bits_on_replicas():
    """Lock step compares replicas bit by bit: no atomic additions."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_lock_step_on_a_device_is_lock_step_on_the_host(layout):
    model, batch, loss = tiny_gpt(layers=2, batch=2, length=8)
    plan = load(Source("cuda.plan", plan_text("tiny_gpt", layout))).require()
    program = compile_plan(model, plan, batch, loss, dtype=torch.float64).program
    state = model.double().state_dict()
    values = {name: value for name, value in state.items() if name in program.params}
    count = program.mesh.size("dp") * program.num_microbatches
    parts = share_leaves(batch_leaves(batch), 1) * count
    rows = [
        {n: torch.cat([part[n] for part in parts[: program.num_microbatches]]) for n in parts[0]}
        for _ in range(program.mesh.size("dp"))
    ]
    host, device = (
        run_lockstep(program, values, [rows, rows], device=torch.device(kind))
        for kind in ("cpu", "cuda")
    )
    for ours, theirs in zip(device, host, strict=True):
        torch.testing.assert_close(ours.loss.cpu(), theirs.loss, rtol=1e-9, atol=1e-12)
        for name, value in theirs.params.items():
            torch.testing.assert_close(ours.params[name].cpu(), value, rtol=1e-8, atol=1e-10)
