"""Values of a model on the meta device are the same, bit for bit, for every mesh."""

from __future__ import annotations

import pytest
import torch

from autoshard.frontend import compile_plan
from autoshard.runtime.control import Control
from autoshard.runtime.init import fill
from autoshard.runtime.state_dict import gather_state
from autoshard.testing.lockstep import run_ranks
from autoshard.testing.models import tiny_gpt, token_batch
from tests.bank.equal import read

TENSOR = "tensor {{ wte: vocab{pad}, head: vocab{pad}, h.*.mlp {{ up: colwise, down: rowwise }} }}"
MESHES = {
    "one rank": "mesh { tp = 1 }\nbatch { micro_batch_size = 2 }",
    "tensor": "mesh { tp = 2 }\nbatch { micro_batch_size = 2 }\n" + TENSOR.format(pad="(pad=1)"),
    "padded": "mesh { tp = 3 }\nbatch { micro_batch_size = 2 }\n"
    + "tensor { wte: vocab(pad=5), head: vocab(pad=5) }",
    "heads": "mesh { tp = 3 }\nbatch { micro_batch_size = 2 }\n"
    + "tensor { h.*.attn { qkv: colwise(parts=3, pad=4), proj: rowwise(pad=4) } }",
    "pipeline": "mesh { pp = 2 }\nbatch { micro_batch_size = 2 }",
    "sharded": "mesh { dp = 2 }\nbatch { micro_batch_size = 1 }\nzero { stage = 3 }",
}


def init(name: str, tensor: torch.Tensor) -> None:
    torch.nn.init.normal_(tensor, std=0.02) if tensor.dim() > 1 else tensor.uniform_()


def initial(plan: str, outside: int) -> dict[str, torch.Tensor]:
    """Return the whole state dict after ``init``; ``outside`` seeds torch's own generator."""
    with torch.device("meta"):
        model, _, loss = tiny_gpt(layers=2, width=8, heads=2, vocab=97, batch=2, length=4)
    batch = token_batch(2, 4, 97)
    program = compile_plan(model, read(plan), batch, loss).program

    values = dict(model.named_parameters(remove_duplicate=False))

    def work(exe) -> dict:
        torch.manual_seed(outside)
        missing = fill(program, exe.storage, values, init, Control(), 7)
        assert not missing
        return gather_state(program, exe.storage, exe.comm, tuple(model.state_dict()))

    return run_ranks(program, {}, work)[1][0]


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    return initial(MESHES["one rank"], outside=1)


@pytest.mark.parametrize("name", [name for name in MESHES if name != "one rank"])
def test_initial_values_are_equal_for_every_mesh(name: str, alone: dict) -> None:
    found = initial(MESHES[name], outside=2)
    assert list(found) == list(alone)
    assert found["wte.weight"].shape == (97, 8)
    assert all(torch.equal(found[key], value) for key, value in alone.items())


def test_parameters_of_one_shape_start_apart(alone: dict) -> None:
    assert not torch.equal(alone["h.0.mlp.up.weight"], alone["h.1.mlp.up.weight"])
