"""Static cost: bytes per parameter of each ZeRO stage, in-flight activations, wire bytes."""

from functools import cache

import pytest
import torch

from autoshard.cost.memory import in_flight, memory
from autoshard.cost.traffic import traffic, wire_bytes
from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.capture import capture
from autoshard.mesh import Mesh
from autoshard.ops.collectives import tied_all_reduce
from autoshard.ops.library import Traffic, spec
from autoshard.source import Source
from autoshard.testing.models import tiny_gpt
from autoshard.testing.plans import Layout, plan_text

ELEMENTS = sum(p.numel() for p in tiny_gpt(layers=2, length=8)[0].parameters())


@cache
def captured():
    return capture(*tiny_gpt(layers=2, batch=2, length=8), mesh=Mesh(()), compare=False)


def compiled(layout):
    model, batch, loss = tiny_gpt(layers=2, batch=layout.samples, length=8)
    plan = load(Source("p.plan", plan_text("tiny_gpt", layout))).require()
    return compile_plan(model, plan, batch, loss, captured=captured()).program


# float32 bytes per parameter with Adam on two ranks: parameters, gradients, optimizer state
@pytest.mark.parametrize(
    ("zero", "params", "grads", "optimizer"),
    [(0, 4, 4, 8), (1, 4, 4, 4), (2, 4, 2, 4), (3, 2, 2, 4)],
)
def test_a_zero_stage_stores_what_its_definition_says(zero, params, grads, optimizer):
    (stage,) = memory(compiled(Layout(dp=2, zero=zero, microbatches=2)))
    stored = (stage.parameters, stage.gradients, stage.optimizer)
    wanted = tuple(size * ELEMENTS for size in (params, grads, optimizer))
    assert stored == pytest.approx(wanted, rel=0.01)  # buckets are padded


def test_stages_of_1f1b_hold_as_many_micro_batches_as_lie_behind_them():
    program = compiled(Layout(pp=2, microbatches=4))
    assert [in_flight(program, stage) for stage in (0, 1)] == [2, 1]


def test_gpipe_holds_all_micro_batches():
    program = compiled(Layout(pp=2, microbatches=4, schedule="gpipe"))
    assert [in_flight(program, stage) for stage in (0, 1)] == [4, 4]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("all_reduce", 150), ("all_gather", 300), ("reduce_scatter", 75), ("send", 100)],
)
def test_wire_bytes_are_the_minimum_of_each_collective(kind, expected):
    assert wire_bytes(Traffic(kind, "dp", 100), 4) == expected


def test_zero_1_sends_what_an_all_reduce_would():
    both = [
        sum(row.wire_bytes for row in traffic(compiled(Layout(dp=2, zero=z, microbatches=2))))
        for z in (0, 1)
    ]
    assert both[1] == pytest.approx(both[0], rel=0.01)


def test_a_tied_gradient_is_summed_by_its_stages_only():
    tied = spec(tied_all_reduce)
    (item,) = tied.traffic(torch.zeros(100), "pp", [0, 11])
    assert item.members == (0, 11) and item.ranks(12) == 2
    assert wire_bytes(item, item.ranks(12)) == item.nbytes
