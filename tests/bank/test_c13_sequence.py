"""C13 under sequence parallelism: residual dropout acts on token shards, attention's on heads.

Masks number the elements of the whole value, so the ranks draw their parts of the one mask that a
single rank draws.
"""

from __future__ import annotations

import pytest
import torch

from autoshard.frontend import compile_plan
from autoshard.ir.program import Program
from autoshard.ops.dropout import DropoutArgs, dropout
from autoshard.testing.equivalence import TOLERANCE, differences, held_values
from autoshard.testing.lockstep import StepRecord, run_lockstep
from autoshard.testing.models import tiny_gpt
from autoshard.testing.plans import Layout, plan_text
from tests.bank.equal import read

BUILT = tiny_gpt(batch=4, length=8, heads=4, dropout=0.5)
ONE = Layout(micro_batch_size=4)
LAYOUT = Layout(tp=2, sequence=True, microbatches=2)


def compiled(layout: Layout) -> Program:
    model, batch, loss = BUILT
    plan = read(plan_text("tiny_gpt", layout).removeprefix("autoshard 1\n"))
    return compile_plan(model, plan, batch, loss, dtype=torch.float64).program


def train(program: Program) -> tuple[StepRecord, ...]:
    values = held_values(BUILT[0], program, torch.float64)
    return run_lockstep(program, values, [[BUILT[1]]] * 2, max_norm=1.0)


@pytest.fixture(scope="module")
def alone() -> tuple[StepRecord, ...]:
    return train(compiled(ONE))


def test_masks_of_token_shards_are_parts_of_the_one_rank_masks(
    alone: tuple[StepRecord, ...],
) -> None:
    program = compiled(LAYOUT)
    sites = program.stages[0].phases["F"].graph.find_nodes(op="call_function", target=dropout)
    shards = {tuple(DropoutArgs(*site.args).dims) for site in sites}
    assert sites and shards == {(1,)}  # tokens of (B, T, C), or heads of (B, H, T, T)
    worst = max(differences(train(program), alone), key=lambda d: d.error)
    assert worst.error <= TOLERANCE, worst


def test_a_mask_that_starts_anew_on_each_rank_is_seen(alone: tuple[StepRecord, ...]) -> None:
    program = compiled(LAYOUT)
    for phase in "FI":
        graph = program.stages[0].phases[phase].graph
        for site in graph.find_nodes(op="call_function", target=dropout):
            site.args = (*site.args[:6], [], [], [], [], [])
    worst = max(differences(train(program), alone), key=lambda d: d.error)
    assert worst.error > 1e-3
