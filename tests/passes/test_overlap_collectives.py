"""What runs beside a collective of activations: counted, bit-equal, and at no higher a peak."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch
from torch.fx import Node

from autoshard.compiler.pass_base import PassContext
from autoshard.compiler.pipeline import Pipeline
from autoshard.cost.replay import peak_of
from autoshard.dsl.load import load
from autoshard.dsl.resolve import Resolved
from autoshard.frontend import Compiled, compile_plan
from autoshard.ir.batch import batch_leaves, share_leaves
from autoshard.ir.capture import capture
from autoshard.ir.flops import node_flops
from autoshard.ir.graph_function import GraphFunction
from autoshard.ir.node_info import info
from autoshard.mesh import Mesh
from autoshard.ops import collectives as ops
from autoshard.passes._beside import find_parts
from autoshard.passes._live_bytes import Units
from autoshard.passes.overlap_collectives import OverlapCollectives
from autoshard.passes.pipelines import default_pipeline
from autoshard.plan import Plan
from autoshard.source import Source
from autoshard.testing.lockstep import StepRecord, run_lockstep
from autoshard.testing.models import tiny_gpt
from autoshard.testing.plans import Layout, plan_text

aten = torch.ops.aten
MODEL, BATCH, LOSS = tiny_gpt(layers=2, batch=2, length=8)
TP, SP = Layout(tp=2), Layout(tp=2, sequence=True)


@cache
def captured():
    return capture(MODEL, BATCH, LOSS, mesh=Mesh(()), compare=False)


@cache
def compiled(layout: Layout, on: bool = True, more: str = "") -> Compiled:
    """Return the program of a layout, with or without the pass; ``more`` is added to the plan."""
    plan = load(Source("overlap.plan", plan_text("tiny_gpt", layout) + more)).require()
    passes = default_pipeline().passes
    if not on:
        passes = tuple(step for step in passes if not isinstance(step, OverlapCollectives))
    pipeline = Pipeline(passes)
    return compile_plan(MODEL, plan, BATCH, LOSS, pipeline=pipeline, captured=captured())


def beside(function: GraphFunction, axis: str = "tp") -> list[list[Node]]:
    """Return for each collective of an axis that is split the calls between start and wait."""
    order = list(function.graph.nodes)
    found = []
    for start in (node for node in order if node.target in ops.STARTS and axis in node.args):
        (wait,) = start.users
        found.append(order[order.index(start) + 1 : order.index(wait)])
    return found


def whole(function: GraphFunction) -> list[Node]:
    kinds = (ops.all_reduce, ops.all_gather, ops.reduce_scatter)
    return [node for node in function.graph.nodes if node.target in kinds and "tp" in node.args]


def products(nodes: list[Node]) -> int:
    return sum(node_flops(node) > 0 for node in nodes)


def trained(layout: Layout, on: bool) -> tuple[StepRecord, ...]:
    program = compiled(layout, on).program
    values = {name: t.detach() for name, t in MODEL.state_dict().items() if name in program.params}
    shares = [share_leaves(batch_leaves(BATCH), 1)[0]] * program.mesh.size("dp")
    return run_lockstep(program, values, [shares, shares])


def test_input_gradients_are_summed_beside_weight_gradients() -> None:
    made = compiled(TP)
    backward = made.program.stages[0].phases["I"]
    found = beside(backward)
    assert len(found) == 2 * 2  # two of each block
    assert all(products(nodes) >= 1 for nodes in found)
    assert [info(node).path for node in whole(backward)] == ["head"]  # there the peak is
    said = [r.message for r in made.remarks if r.pass_name == OverlapCollectives.name]
    assert "4 of 5 collectives run beside computation" in said
    assert any("would raise the peak" in text for text in said)


def test_a_sum_that_needs_all_that_is_computed_stays_whole() -> None:
    forward = compiled(TP).program.stages[0].phases["F"]
    assert len(whole(forward)) == 2 * 2  # each is read by what follows
    (embedding,) = beside(forward)
    assert [info(node).path for node in embedding if node.target is aten.embedding.default] == [
        "wpe"
    ]


def test_a_scatter_and_the_gather_behind_it_share_the_weight_gradients() -> None:
    backward = compiled(SP).program.stages[0].phases["I"]
    assert not whole(backward)
    order = list(backward.graph.nodes)
    starts = [node for node in order if node.target in ops.STARTS]
    shared = [
        (products(before), products(after))
        for (one, before), (other, after) in pairwise(zip(starts, beside(backward), strict=True))
        if one.target is ops.reduce_scatter_start and other.target is ops.all_gather_start
    ]
    assert (1, 1) in shared


def test_phases_with_weight_gradients_apart_have_nothing_beside_a_sum() -> None:
    layout = Layout(tp=2, pp=2, microbatches=2, schedule="zb_h1")
    for stage in compiled(layout).program.stages:
        assert not beside(stage.phases["I"])
        assert not whole(stage.phases["W"])


def test_a_second_run_moves_nothing() -> None:
    program = compiled(SP).program.fork()
    before = [[node.name for node in f.graph.nodes] for _, f in program.functions()]
    OverlapCollectives().run(program, PassContext(Resolved(Plan(), program.mesh, 2, 1, 2)))
    assert [[node.name for node in f.graph.nodes] for _, f in program.functions()] == before


def test_less_computation_is_moved_when_bytes_travel_faster() -> None:
    program = compiled(TP, False).program
    backward = program.stages[0].phases["I"]
    few, many = (find_parts(backward, wanted, Units()) for wanted in (1, 4096))
    assert sum(len(p.inside) for p in few) < sum(len(p.inside) for p in many)


@pytest.mark.parametrize("layout", [TP, SP, Layout(dp=2, tp=2, zero=3, sequence=True)], ids=str)
def test_moving_collectives_changes_no_bit(layout: Layout) -> None:
    with_pass, without = trained(layout, on=True), trained(layout, on=False)
    for one, other in zip(with_pass, without, strict=True):
        assert torch.equal(one.loss, other.loss)
        assert all(torch.equal(one.grads[name], grad) for name, grad in other.grads.items())
        assert all(torch.equal(one.params[name], value) for name, value in other.params.items())


CELLS = [
    (TP, ""),
    (SP, ""),
    (SP, "recompute { h.*: full }"),
    (Layout(tp=2, pp=2, microbatches=2), ""),
    (Layout(dp=2, tp=2, zero=2), ""),
    (Layout(dp=2, tp=2, zero=3, sequence=True), ""),
]


@pytest.mark.parametrize(("layout", "more"), CELLS, ids=str)
def test_the_predicted_peak_is_no_higher(layout: Layout, more: str) -> None:
    after, before = (
        [peak_of(compiled(layout, on, more).program, rank).total for rank in range(layout.pp)]
        for on in (True, False)
    )
    assert all(new <= old for new, old in zip(after, before, strict=True)), (after, before)
