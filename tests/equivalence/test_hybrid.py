"""Hybrid sharding: stored over dp_shard, gradients summed over both axes, each element once."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from autoshard.cost.memory import memory
from autoshard.cost.traffic import traffic
from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.capture import capture
from autoshard.ir.program import Program
from autoshard.ir.promote import promote
from autoshard.mesh import Mesh
from autoshard.proof.static import static_rows
from autoshard.proof.verdict import Status
from autoshard.runtime.control import Control
from autoshard.runtime.executor import Executable
from autoshard.runtime.state_dict import gather_state, load_state
from autoshard.source import Source
from autoshard.testing import runtime_faults
from autoshard.testing.equivalence import TOLERANCE, compare_compiled, reference_run
from autoshard.testing.lockstep import run_ranks
from autoshard.testing.models import tiny_gpt
from autoshard.testing.mutants import QUICK, Subject, named
from autoshard.testing.plans import Layout, plan_text

SAMPLES = 8
CELLS = (
    *(Layout(dp=4, shard=2, zero=stage, microbatches=2, micro_batch_size=1) for stage in (1, 2, 3)),
    Layout(dp=4, shard=2, pp=2, zero=3, microbatches=2, micro_batch_size=1),
    Layout(dp=4, shard=2, tp=2, zero=2, sequence=True),
)


@cache
def built():
    return tiny_gpt(layers=2, batch=SAMPLES, length=8)


@cache
def captured(size: int):
    model, batch, loss = tiny_gpt(layers=2, batch=size, length=8)
    return promote(capture(model, batch, loss, mesh=Mesh(()), compare=False))


@cache
def reference():
    return reference_run(*built())


def compiled(layout: Layout, text: str = ""):
    model, batch, loss = built()
    plan = load(Source("p.plan", text or plan_text("tiny_gpt", layout))).require()
    known = captured(layout.micro_batch_size)
    return compile_plan(model, plan, batch, loss, captured=known)


def assert_equal(program: Program) -> None:
    model, batch, _ = built()
    comparison = compare_compiled(program, model, batch, reference())
    wrong = comparison.first_wrong(TOLERANCE)
    assert wrong is None, f"{wrong} (worst: {comparison.worst})"


@pytest.mark.parametrize("layout", CELLS, ids=str)
def test_hybrid_sharding_trains_as_one_process_does(layout: Layout) -> None:
    found = compiled(layout)
    rows = static_rows(found.program, found.plain)
    assert [row.link for row in rows if row.status is not Status.PROVED] == []
    assert_equal(found.program)


def test_the_axes_may_stand_on_both_sides_of_the_pipeline() -> None:
    layout = CELLS[3]
    text = plan_text("tiny_gpt", layout)
    inside = "pp = 2, dp_replicate = 2, dp_shard = 2"
    assert inside in text
    around = "dp_shard = 2, pp = 2, dp_replicate = 2"
    assert_equal(compiled(layout, text.replace(inside, around)).program)


@cache
def subject() -> Subject:
    return Subject(next(cell for cell in QUICK if cell.layout.shard))


@pytest.mark.parametrize("name", ("skip-replica-sum", "sum-replicas-twice", "sum-all-shards"))
def test_a_wrong_sum_over_replicas_is_told_before_anything_runs(name: str) -> None:
    broken = subject().program.fork()
    assert named(name).plant(broken)
    assert subject().caught_by(broken, numbers=False) == "types"
    assert subject().differs(broken)


def test_a_shard_that_counts_twice_in_the_norm_is_seen() -> None:
    fault = runtime_faults.FAULTS["count-replicas"]
    assert subject().caught_by(subject().program, fault(), numbers=False) == "types"
    with fault():
        assert subject().differs(subject().program)


def test_copies_cost_memory_and_save_traffic_inside() -> None:
    layouts = (CELLS[2], replace(CELLS[2], shard=4))
    hybrid, plain = (compiled(layout).program for layout in layouts)
    parts = [memory(program)[0].optimizer for program in (hybrid, plain)]
    assert parts[0] == pytest.approx(2 * parts[1], rel=0.02)
    rows = {(row.axis, row.kind): row for row in traffic(hybrid)}
    scattered, summed = rows["dp_shard", "reduce_scatter"], rows["dp_replicate", "all_reduce"]
    # Each micro-batch is reduced inside a group; its shard goes between groups once a step.
    assert scattered.payload_bytes == 2 * 2 * summed.payload_bytes


def test_a_checkpoint_is_loaded_and_saved_as_it_was() -> None:
    program, state = compiled(CELLS[2]).program, built()[0].state_dict()

    def load_and_save(exe: Executable) -> dict:
        load_state(program, exe.storage, Control(), tuple(state), state)
        return gather_state(program, exe.storage, exe.comm, tuple(state))

    first, *others = run_ranks(program, {}, load_and_save)[1]
    assert others == [{}] * 3
    assert all(torch.equal(first[n], v.to(first[n].dtype)) for n, v in state.items())
