"""Memory as predicted from a program is what real ranks hold, by category and in sum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch

from autoshard.cost.peak import (
    ACTIVATIONS,
    CATEGORIES,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Peak,
)
from autoshard.cost.replay import peak_of, peaks
from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.batch import share_leaves
from autoshard.ir.capture import capture
from autoshard.ir.program import Program
from autoshard.mesh import Mesh
from autoshard.ops.communicator import Work
from autoshard.runtime.batch import split_leaves
from autoshard.runtime.comm import ProcessGroups
from autoshard.runtime.ledger import Ledger, hold_state, measured
from autoshard.runtime.link import link
from autoshard.runtime.offload import HostMemory
from autoshard.source import Source
from autoshard.testing.lockstep import adamw
from autoshard.testing.models import tiny_gpt
from autoshard.testing.plans import Layout, plan_text
from autoshard.testing.processes import run_processes

model_of = partial(tiny_gpt, layers=3, width=64, heads=4, length=32)


@dataclass(frozen=True)
class Cell:
    """A layout, with more settings in its `zero` block and more blocks."""

    layout: Layout
    zero: str = ""
    blocks: str = ""

    @property
    def plan(self) -> str:
        """Return the plan's text."""
        text = plan_text("tiny_gpt", self.layout, self.blocks)
        return text.replace("zero { ", f"zero {{ {self.zero}\n")


class WithHost(ProcessGroups):
    """Ranks whose device has memory of its own, and a transport that keeps parts as NCCL does."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.host = HostMemory(self.device)

    def all_gather_start(self, value: torch.Tensor, axis: str) -> Work:
        part = self.host.fetch(value)
        work = self._axes[axis].all_gather(part)
        work.part = part  # until it is waited for
        return work


HALF = "precision { params = bf16 }"
CELLS = {
    "zero 0": Cell(Layout(dp=2, zero=0)),
    "zero 1": Cell(Layout(dp=2, zero=1, microbatches=2)),
    "zero 2": Cell(Layout(dp=2, zero=2, microbatches=2)),
    "zero 3": Cell(Layout(dp=2, zero=3)),
    "zero 3, recomputed, bf16": Cell(
        Layout(dp=2, zero=3), blocks=f"recompute {{ h.*: full }}\n{HALF}"
    ),
    "zero 3, recomputed selectively": Cell(
        Layout(dp=2, zero=3), blocks="recompute { h.*: selective(save=[attention]) }"
    ),
    "zero 3, recomputed within a budget": Cell(
        Layout(dp=2, zero=3), blocks="recompute { budget = 50% }"
    ),
    "zero 3, kept within a limit": Cell(
        Layout(dp=2, zero=3), "prefetch = 3, reshard_after_forward = off, max_gathered = 500KiB"
    ),
    "pipeline, zero 1": Cell(Layout(dp=2, pp=2, zero=1, microbatches=3)),
    "zero 1, offloaded, bf16": Cell(
        Layout(dp=2, zero=1, microbatches=2), "offload_optimizer = cpu", HALF
    ),
    "zero 3, offloaded": Cell(Layout(dp=2, zero=3), "offload_params = cpu"),
}


@cache
def captured() -> Program:
    return capture(*model_of(batch=2), mesh=Mesh(()), compare=False)


@cache
def compiled(name: str) -> Program:
    model, batch, loss = model_of(batch=2)
    plan = load(Source("p.plan", CELLS[name].plan)).require()
    return compile_plan(model, plan, batch, loss, captured=captured()).program


def measure(name: str) -> list[tuple[int, Peak]]:
    """Return the pipeline coordinate and the peak of every rank in its second step."""
    program, layout = compiled(name), CELLS[name].layout
    model, batch, _ = model_of(batch=layout.samples)

    def body(rank: int) -> tuple[int, Peak]:
        kind = WithHost if "offload" in CELLS[name].zero else ProcessGroups
        comm = kind(program.mesh, rank, torch.device("cpu"))
        exe = link(program, comm)
        for fqn, value in model.state_dict(keep_vars=True).items():
            if fqn in {spec.fqn for spec in program.params}:
                exe.storage.write(fqn, value)
        leaves = share_leaves(batch, layout.dp)[comm.index("dp")]
        parts = split_leaves(leaves, program.leaves, program.num_microbatches)
        optimizer = adamw(exe.storage.parameters.values())
        exe.step(parts)
        optimizer.step()
        exe.storage.drop_gradients()
        ledger, states = Ledger(), optimizer.state.items()
        hold_state(ledger, exe.storage, ((p, t) for p, held in states for t in held.values()))
        with measured([exe], ledger):
            exe.step(parts)
        return comm.index("pp"), ledger.peak

    return run_processes(layout.world_size, body, 60)


@pytest.mark.parametrize("name", CELLS)
def test_predicted_memory_is_what_ranks_hold(name: str) -> None:
    expected = peaks(compiled(name))
    for coordinate, peak in measure(name):
        predicted = expected[coordinate]
        found = {c: (predicted.sizes.get(c, 0), peak.sizes.get(c, 0)) for c in CATEGORIES}
        assert predicted.total / peak.total == pytest.approx(1, abs=0.05), found
        assert predicted.host == pytest.approx(peak.host, rel=0.05)
        if name != "zero 1, offloaded, bf16":  # `WithHost` copies parts that are there already
            assert predicted.gathered == peak.gathered
        assert predicted.gathered <= 500 * 2**10 or "limit" not in name
        for category, (one, other) in found.items():
            assert abs(one - other) < 0.05 * peak.total, category


def test_the_peak_names_what_is_running() -> None:
    (whole,), (cut,) = peaks(compiled("zero 0")), peaks(compiled("zero 3"))
    assert whole.place.startswith("0B0: ") and " of h." in whole.place
    assert cut.sizes[GATHERED] > 0 and GATHERED not in whole.sizes
    assert cut.total < whole.total
    for how in (", bf16", " selectively", " within a budget"):
        (recomputed,) = peaks(compiled(f"zero 3, recomputed{how}"))
        saved = cut.sizes[ACTIVATIONS] - recomputed.sizes[ACTIVATIONS]
        assert saved > 0.05 * cut.total, how  # more than a prediction may be wrong by


def test_what_is_offloaded_is_on_the_host_and_in_no_sum() -> None:
    (here,), (away,) = (peaks(compiled("zero 3, offloaded"), has_host=h) for h in (False, True))
    (plain,) = peaks(compiled("zero 3"))
    assert plain == here and here.host == 0
    state = here.sizes[PARAMETERS] + here.sizes[OPTIMIZER]
    assert not away.sizes.get(PARAMETERS) and not away.sizes.get(OPTIMIZER)
    assert away.sizes[ACTIVATIONS] == here.sizes[ACTIVATIONS]
    assert away.host == pytest.approx(4 / 3 * state, rel=0.05)  # and gradients


def test_a_ledger_counts_what_lives_and_sees_it_go() -> None:
    with Ledger() as ledger, ledger.counting(GRADIENTS):
        a = torch.ones(1000)
        b = a[:10].view(2, 5)  # a view is no storage
        del a
        c = torch.ones(500)
        del b, c
        d = torch.ones(100)
    assert ledger.peak.total == 4 * 1500
    assert ledger.peak.sizes == {GRADIENTS: 6000}
    assert ledger.now == {GRADIENTS: d.nbytes}


class _Scaled(torch.nn.Module):
    """A layer that reads a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.fc(x) * self.scale).sum()


def test_a_buffer_that_the_model_reads_counts_as_stored() -> None:
    plan = load(Source("plan", "autoshard 1\nbatch { micro_batch_size = 2 }\n")).require()
    program = compile_plan(_Scaled(), plan, {"x": torch.ones(2, 4)}).program
    assert peak_of(program, 0, "adamw").sizes["parameters"] == 4 * (4 * 3 + 3 + 3)
