"""Each ZeRO stage moves the minimum: bytes read off the program, and sent, against the paper's.

In units of one all-reduce of all gradients: 1, 1, 1 and 1.5 for stages 0 to 3 at one micro-batch
(Rajbhandari et al. 2020, section 7); with m micro-batches as the stage's docstring says.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import pytest
import torch

from autoshard.cost.memory import memory
from autoshard.cost.traffic import traffic
from autoshard.cost.zero_table import stored_state
from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.capture import capture
from autoshard.ir.program import Program
from autoshard.mesh import Mesh
from autoshard.plan import PrecisionBlock
from autoshard.runtime.batch import split_leaves
from autoshard.runtime.comm import ProcessGroups
from autoshard.runtime.link import link
from autoshard.source import Source
from autoshard.testing.models import tiny_mlp
from autoshard.testing.processes import run_processes

RANKS, ITEMSIZE = 4, 4
WHOLE = "param_persistence_threshold = 0KiB"


@cache
def captured() -> Program:
    model, batch, loss = tiny_mlp(batch=2)
    return capture(model, batch, loss, mesh=Mesh(()), compare=False)


def compiled(zero: str, microbatches: int, extra: str = "", ranks: int = RANKS) -> Program:
    model, batch, loss = tiny_mlp(batch=2)
    text = f"""autoshard 1
    mesh {{ dp = {ranks} }}
    batch {{ micro_batch_size = 2, num_microbatches = {microbatches} }}
    zero {{ {zero} }}
    {extra}
    """
    plan = load(Source("p.plan", text)).require()
    return compile_plan(model, plan, batch, loss, captured=captured()).program


def elements() -> int:
    return sum(p.numel() for p in tiny_mlp()[0].parameters())


def all_reduces(zero: str, microbatches: int, extra: str = "") -> Fraction:
    """Return what one rank sends in a step, in all-reduces of every gradient in float32."""
    program = compiled(zero, microbatches, extra)
    one = 2 * (RANKS - 1) * elements() * ITEMSIZE // RANKS
    return Fraction(sum(row.wire_bytes for row in traffic(program)), one)


# In all-reduces, as a function of the number of micro-batches.
MINIMA = {
    "stage = 0": lambda m: 1,
    "stage = 1": lambda m: 1,
    "stage = 2": lambda m: Fraction(1 + m, 2),
    f"stage = 3, {WHOLE}": lambda m: Fraction(3 * m, 2),
    f"stage = 3, {WHOLE}, reshard_after_forward = off": lambda m: m,
    f"stage = 3, {WHOLE}, reshard_after_forward = step": lambda m: 1,
}


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("zero", MINIMA)
def test_a_stage_sends_its_minimum(zero: str, m: int) -> None:
    assert all_reduces(zero, m) == MINIMA[zero](m)


def test_ranks_send_what_the_program_says() -> None:
    programs = {(z, m): compiled(z, m, ranks=2) for z in MINIMA for m in (1, 3)}
    (one,) = {sum(b.length for b in p.buckets) * ITEMSIZE for p in programs.values()}

    def body(rank: int) -> dict[tuple[str, int], int]:
        sent = {}
        for key, program in programs.items():
            comm = ProcessGroups(program.mesh, rank, torch.device("cpu"))
            exe = link(program, comm)
            batch = tiny_mlp(batch=2 * program.num_microbatches)[1]
            exe.step(split_leaves(batch, program.leaves, program.num_microbatches))
            sent[key] = comm.clock.sent
        return sent

    for rank in run_processes(2, body, timeout_s=60):
        for (zero, m), sent in rank.items():
            of_loss = sent - MINIMA[zero](m) * one  # the loss and its counts are summed as well
            assert 0 < of_loss <= 16, (zero, m)


def test_half_precision_halves_gathers_and_reductions_as_asked() -> None:
    zero = f"stage = 3, {WHOLE}"
    half = all_reduces(zero, 1, "precision { params = bf16 }")
    assert half == Fraction(2 * Fraction(1, 2) + 1, 2)  # two gathers of 2 bytes, one sum of 4
    both = all_reduces(zero, 1, "precision { params = bf16, reduce = bf16 }")
    assert both == Fraction(3, 4)


@pytest.mark.parametrize("precision", [("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32")])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_per_parameter_are_the_formula_s(stage: int, precision: tuple[str, str]) -> None:
    params, grads = precision
    whole = f", {WHOLE}" if stage == 3 else ""
    block = f"precision {{ params = {params}, grads = {grads} }}"
    (held,) = memory(compiled(f"stage = {stage}{whole}", 1, block))
    stored = held.parameters + held.gradients + held.optimizer
    formula = stored_state(PrecisionBlock(params, grads=grads), stage)
    assert Fraction(stored, elements()) == formula.bytes_per_parameter(stage, RANKS)
