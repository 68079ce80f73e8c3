"""What broke other systems' sharded storage: uneven shards, weights read elsewhere, no gradient."""

import pytest
import torch

from autoshard.ir.buckets import unreached_parameters
from autoshard.ir.graph_function import FLAT_GRAD
from autoshard.mesh import Mesh
from autoshard.ops import collectives as ops
from autoshard.passes.lower_schedule import LowerSchedule
from autoshard.testing.lockstep import run_lockstep
from tests.passes.evaluate import run_step
from tests.passes.programs import (
    TOLERANCE,
    before,
    compile_with,
    context,
    expected,
    leaves,
    state_of,
    worst,
)
from tests.passes.test_zero_equals_autograd import OVERLAP, PASSES, ShardStorage, check, zero
from tests.passes.toys import Gpt, WeightElsewhere, token_batch


@pytest.mark.parametrize("bucket", ("tiny", "one"))
def test_every_row_of_a_tied_weight_is_in_some_shard(bucket: str) -> None:
    """23 x 16 elements over three ranks: shards of 123, one element of padding."""
    program, step = check(Gpt(), Mesh.of(dp=3), zero(3, bucket), OVERLAP)
    assert any(b.length % 3 == 0 and "emb.weight" in b.fqns for b in program.buckets)
    assert step.grads["emb.weight"].abs().sum(1).gt(0).all()


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_weights_read_outside_their_module_are_gathered_where_they_are_read(stage: int) -> None:
    model = WeightElsewhere().double()
    ctx = context(Mesh.of(dp=2), zero=zero(stage), pipeline=before())
    program = compile_with((*PASSES, ShardStorage(), *OVERLAP), model, token_batch(), ctx)
    batches = {d: [token_batch(), token_batch()] for d in range(2)}
    loss, grads = expected(model, [b for group in batches.values() for b in group])
    given = {d: [leaves(b) for b in group] for d, group in batches.items()}
    step = run_step(program, state_of(model, program), given)
    for name in ("cut_off.weight", "cut_off.bias"):
        assert not step.grads.pop(name, torch.zeros(1)).any()  # a gap of zeros, or no bucket
    assert abs(step.loss - loss) <= TOLERANCE * abs(loss)
    assert worst(step.grads, grads) <= TOLERANCE


@pytest.mark.parametrize("stage", (0, 3))
def test_a_parameter_behind_a_detach_gets_no_gradient_at_run_time(stage: int) -> None:
    model = WeightElsewhere().double()
    ctx = context(Mesh.of(dp=2), zero=zero(stage), pipeline=before())
    passes = (*PASSES, ShardStorage(), *OVERLAP, LowerSchedule())
    program = compile_with(passes, model, token_batch(), ctx)
    assert unreached_parameters(program) == {"cut_off.weight", "cut_off.bias"}
    whole = [leaves(token_batch(4)) for _ in range(2)]
    (record,) = run_lockstep(program, state_of(model, program), [whole])
    assert "cut_off.weight" not in record.grads and "emb.weight" in record.grads
    assert torch.equal(record.params["cut_off.weight"], model.cut_off.weight.detach())


def test_a_gap_in_a_bucket_is_reduced_as_zeros() -> None:
    ctx = context(Mesh.of(dp=2), zero=zero(2, units=("emb",)), pipeline=before())
    passes = (*PASSES, ShardStorage(), *OVERLAP)
    program = compile_with(passes, WeightElsewhere().double(), token_batch(), ctx)
    backward = program.stages[0].phases["I"]
    assert "s0.root" in backward.named_results(FLAT_GRAD)
    packs = backward.graph.find_nodes(op="call_function", target=ops.pack)
    zeros = [n for p in packs for n in p.args[0] if n.target is torch.ops.aten.new_zeros.default]
    assert len(zeros) == 2
