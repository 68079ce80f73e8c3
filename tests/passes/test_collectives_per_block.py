"""The collectives of one Transformer block in the program that runs: the known minimum, no copies.

Megatron-LM's counts: two all_reduces forward and two backward; with sequence parallelism each is a
reduce_scatter and an all_gather, of the same bytes together. What backward needs of a gathered
value is kept from forward, so nothing is gathered again.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch.fx import Node

from autoshard.cost.traffic import node_traffic, wire_bytes
from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.capture import capture
from autoshard.ir.node_info import info
from autoshard.ir.program import Program
from autoshard.mesh import Mesh
from autoshard.source import Source
from autoshard.testing.models import tiny_gpt, tiny_hf
from autoshard.testing.plans import PIPELINE_UNITS, Layout, plan_text

aten = torch.ops.aten
FAMILIES = ("tiny_gpt", "gpt2", "bloom", "llama")
COPIES = (aten.clone.default, aten._to_copy.default, aten.contiguous.default)
B, T, C = 2, 8, 32  # samples, tokens, width
BLOCK = 1  # of two: its neighbours' collectives are not its own


@cache
def built(family: str):
    if family == "tiny_gpt":
        return tiny_gpt(batch=B, length=T, width=C)
    return tiny_hf(family, batch=B, length=T, width=C)


@cache
def captured(family: str):
    model, batch, loss = built(family)
    return capture(model, batch, loss, mesh=Mesh(()), compare=False)


@cache
def program(family: str, layout: Layout, precision: str = "") -> Program:
    model, batch, loss = built(family)
    plan = load(Source("block.plan", plan_text(family, layout) + precision)).require()
    compiled = compile_plan(
        model, plan, batch, loss, until="split-phases", captured=captured(family)
    )
    return compiled.program


def block(family: str, layout: Layout, precision: str = "") -> dict[str, list[Node]]:
    """Return the calls of one block in F and in I, which holds all of backward."""
    path = PIPELINE_UNITS[family].replace("*", str(BLOCK))
    phases = program(family, layout, precision).stages[0].phases
    return {name: [n for n in phases[name].graph.nodes if _inside(n, path)] for name in "FI"}


def _inside(node: Node, path: str) -> bool:
    own = info(node).path
    return node.op == "call_function" and (own == path or own.startswith(f"{path}."))


def collectives(nodes: list[Node]) -> Counter:
    return Counter(item.kind for node in nodes for item in node_traffic(node))


def sent(nodes: list[Node], ranks: int) -> int:
    return sum(wire_bytes(item, ranks) for node in nodes for item in node_traffic(node))


def copies(nodes: list[Node]) -> int:
    return sum(node.target in COPIES for node in nodes)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_communicates_the_known_minimum_and_copies_nothing_more(family: str) -> None:
    alone = block(family, Layout())
    summed = block(family, Layout(tp=2))
    scattered = block(family, Layout(tp=2, sequence=True))
    for phase in "FI":
        assert collectives(summed[phase]) == {"all_reduce": 2}
        assert collectives(scattered[phase]) == {"reduce_scatter": 2, "all_gather": 2}
        assert sent(scattered[phase], 2) == sent(summed[phase], 2) == 2 * B * T * C * 4
        assert copies(scattered[phase]) == copies(summed[phase]) == copies(alone[phase])


BF16 = "\nprecision { params = bf16 }"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_block_in_bf16_casts_no_more_than_on_one_rank(family: str) -> None:
    alone = block(family, Layout(), BF16)
    for layout in (Layout(tp=2), Layout(tp=2, sequence=True)):
        split = block(family, layout, BF16)
        for phase in "FI":
            assert copies(split[phase]) == copies(alone[phase])
            moved = [n.meta["val"].dtype for n in split[phase] if node_traffic(n)]
            assert set(moved) == {torch.bfloat16}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_all_norms_and_biases_of_a_stage_are_one_sum(family: str) -> None:
    made = program(family, Layout(tp=2, sequence=True))
    nodes = list(made.stages[0].phases["I"].graph.nodes)
    sums = [node for node in nodes if collectives([node])["all_reduce"]]
    assert len(sums) == 1
    trained = made.params.trainable()
    whole = [s for s in trained if not s.is_sharded("tp") and len(s.shape) == 1]
    assert sums[0].meta["val"].numel() == sum(s.shape[0] for s in whole)
