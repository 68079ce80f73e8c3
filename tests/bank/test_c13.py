"""C13: one mask on all ranks where a value is whole, one mask's parts where it is split."""

from __future__ import annotations

import copy

import pytest
import torch

import autoshard
from autoshard.diagnostics import CheckpointError
from autoshard.ir.program import Program
from autoshard.ops.dropout import DropoutArgs, dropout, keep
from autoshard.testing.models import Built, tiny_gpt
from tests.bank.equal import assert_equal, finding
from tests.passes.plans import RULES
from tests.passes.ranks import on_ranks
from tests.passes.tensor_parallel import compiled

PLAN = """
mesh {{ {mesh} }}
batch {{ {batch} }}
tensor {{
  h.* {{ attn.qkv: colwise(parts=3), attn.proj: rowwise, mlp.up: colwise, mlp.down: rowwise }}
}}
"""
TWO = PLAN.format(mesh="tp = 2", batch="micro_batch_size = 4")
MESHES = {
    "tensor and pipeline": PLAN.format(mesh="tp = 2, pp = 2", batch="micro_batch_size = 4"),
    "one head a rank, recomputed": PLAN.format(mesh="tp = 4", batch="micro_batch_size = 4")
    + "recompute { h.*: full }",
    "data and micro-batches": PLAN.format(
        mesh="dp = 2, tp = 1", batch="micro_batch_size = 1, num_microbatches = 2"
    ),
}
ONE = "autoshard 1\nmesh { tp = 1 }\nbatch { micro_batch_size = 4 }\n"


def dropping(layers: int = 2) -> Built:
    """Return the toy with dropout in attention (split) and on the residual (whole)."""
    return tiny_gpt(layers=layers, heads=4, length=8, dropout=0.5)


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_draws_the_masks_of_one_process(name: str) -> None:
    assert_equal(dropping(), MESHES[name], plain=False, steps=1)


def test_residual_masks_are_equal_over_the_ranks_and_attention_masks_are_not() -> None:
    model, batch, loss = dropping(layers=1)
    program, _ = compiled(model, batch, RULES["gpt"], loss=loss)
    found = program.forward.graph.find_nodes(op="call_function", target=dropout)
    split = [bool(DropoutArgs(*node.args).dims) for node in found]
    assert split == [True, False, False]  # attention, its projection, the MLP
    for node, is_split in zip(found, split, strict=True):
        value = node.args[0].meta["val"]
        args = DropoutArgs(*node.args)._replace(
            x=torch.ones(value.shape), rng=torch.tensor([7, 3, 0])
        )
        one, two = on_ranks(2, lambda comm, args=args: keep(args, comm))
        assert torch.equal(one, two) != is_split


def share_the_mask(program: Program) -> bool:
    """Plant the fault: draw an attention mask as if the value were whole."""
    graph = program.stages[0].phases["F"].graph
    for node in graph.find_nodes(op="call_function", target=dropout):
        args = DropoutArgs(*node.args)
        if args.dims:
            node.args = tuple(args._replace(dims=[], counts=[], blocks=[], axes=[], sizes=[]))
            return True
    return False


def test_one_mask_for_all_heads_would_be_seen() -> None:
    assert finding(dropping(layers=1), TWO, share_the_mask) == "loss"


def losses(engine: autoshard.Engine, batch: dict, steps: int, optimizer) -> list[torch.Tensor]:
    found = []
    for _ in range(steps):
        found.append(engine.forward_backward(batch))
        optimizer.step()
        optimizer.zero_grad()
    return found


def started(seed: int = 0) -> tuple:
    """Return an engine, its optimizer and the batch, as a new process would make them."""
    model, batch, loss = dropping(layers=1)
    torch.manual_seed(seed)
    engine = autoshard.parallelize(model, ONE, example=batch, loss=loss)
    return engine, torch.optim.AdamW(engine.parameters(), lr=0.01), batch


def test_a_resumed_run_repeats_the_masks_of_the_uninterrupted_one() -> None:
    engine, optimizer, batch = started()
    losses(engine, batch, 2, optimizer)
    optimizer_state = copy.deepcopy(optimizer.state_dict())
    saved = (engine.full_state_dict(), optimizer_state, engine.rng_state())
    assert saved[2]["step"] == 2
    expected = losses(engine, batch, 2, optimizer)

    resumed, again, batch = started(seed=5)
    resumed.load_full_state_dict(saved[0])
    again.load_state_dict(saved[1])
    other = resumed.forward_backward(batch)
    again.zero_grad()
    assert not torch.equal(other, expected[0])  # without its random numbers it drops others
    resumed.load_rng_state(saved[2])
    assert all(map(torch.equal, losses(resumed, batch, 2, again), expected))
    with pytest.raises(CheckpointError, match="no state of random numbers"):
        resumed.load_rng_state({"step": 3})
