"""Capture gives one faithful forward graph with named ports."""

import pytest
import torch

from autoshard.ir.capture import capture
from autoshard.ir.graph_function import BATCH, LOSS, PARAM, RNG
from autoshard.ir.node_info import info
from autoshard.mesh import Mesh
from autoshard.testing.models import tiny_gpt, tiny_hf

MESH = Mesh.of(tp=2)


def test_a_tied_weight_is_one_input_under_its_first_name() -> None:
    model, batch, loss = tiny_gpt()
    program = capture(model, batch, loss, mesh=MESH)
    names = list(program.forward.named(PARAM))
    assert "wte.weight" in names and "head.weight" not in names
    assert program.params["head.weight"].fqn == "wte.weight"
    assert len(program.forward.node(PARAM, "wte.weight").users) == 2


def test_ports_name_the_batch_and_the_loss() -> None:
    model, batch, loss = tiny_gpt(dropout=0.1)
    function = capture(model, batch, loss, mesh=MESH).forward
    assert list(function.named(BATCH)) == ["ids", "labels"]
    assert [port.kind for port in function.outputs] == [LOSS]
    assert function.node(RNG).meta["val"].dtype is torch.int64


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "llama", "opt"])
def test_every_block_node_has_a_path_and_a_source_line(kind: str) -> None:
    model, batch, loss = tiny_hf(kind)
    function = capture(model, batch, loss, mesh=MESH).forward
    linear = [n for n in function.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert linear and all(info(n).path and info(n).source for n in linear)
