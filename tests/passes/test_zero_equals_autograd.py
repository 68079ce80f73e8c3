"""Programs with sharded storage compute what eager autograd computes on the whole batch."""

import pytest
import torch

from autoshard.ir.invariants_pipeline import check_phased
from autoshard.mesh import Mesh
from autoshard.passes.bucket_collectives import BucketCollectives
from autoshard.passes.cut_stages import CutStages
from autoshard.passes.lower_joint import LowerJoint
from autoshard.passes.prefetch_gathers import PrefetchGathers
from autoshard.passes.release_gathers import ReleaseGathers
from autoshard.passes.shard_storage import ShardStorage
from autoshard.passes.split_collectives import SplitCollectives
from autoshard.passes.split_phases import SplitPhases
from autoshard.plan import ZeroBlock
from autoshard.units import Size
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
from tests.passes.toys import WIDTH, Frozen, Gpt, token_batch

PASSES = (CutStages(), LowerJoint(), SplitPhases())
OVERLAP = (BucketCollectives(), SplitCollectives(), PrefetchGathers(), ReleaseGathers())
NOTHING_SMALL = Size(0)
BUCKETS = {"tiny": Size(1), "medium": Size(8 * 1024), "one": Size(2**20)}


def zero(stage: int, bucket: str = "one", **settings: object) -> ZeroBlock:
    """Return a zero block whose buckets have one size; no parameter is too small to cut."""
    size = BUCKETS[bucket]
    persistence = settings.pop("param_persistence_threshold", NOTHING_SMALL)
    return ZeroBlock(
        stage=stage,
        gather_bucket=size,
        reduce_bucket=size,
        param_persistence_threshold=persistence,
        **settings,
    )


def check(model, mesh: Mesh, block: ZeroBlock, extra=(), make=token_batch, weights="auto"):
    """Compare loss and all gradients with eager; return program and step."""
    model = model.double()
    cuts = ("h.1",) if mesh.size("pp") == 2 else ()
    ctx = context(mesh, pipeline=before(*cuts), zero=block)
    passes = (CutStages(), LowerJoint(), SplitPhases(weights), ShardStorage(), *extra)
    batches = {d: [make(), make()] for d in range(mesh.size("dp"))}
    program = compile_with(passes, model, batches[0][0], ctx)
    check_phased(program)
    loss, grads = expected(model, [b for group in batches.values() for b in group])
    given = {d: [leaves(b) for b in group] for d, group in batches.items()}
    step = run_step(program, state_of(model, program), given)
    assert abs(step.loss - loss) <= TOLERANCE * abs(loss)
    assert worst(step.grads, grads) <= TOLERANCE
    for copies in step.copies.values():
        assert all(torch.equal(copies[0], copy) for copy in copies[1:])
    return program, step


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch for models of plain vectors."""
    return torch.randn(2, WIDTH).double(), torch.randn(2, WIDTH).double()


@pytest.mark.parametrize("mesh", (Mesh.of(dp=2), Mesh.of(pp=2, dp=2), Mesh.of(pp=2)), ids=str)
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_each_zero_stage_gives_eager_gradients(stage: int, mesh: Mesh) -> None:
    check(Gpt(), mesh, zero(stage))
    check(Gpt(), mesh, zero(stage), [BucketCollectives()])


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_bucket_sizes_change_nothing(stage: int, bucket: str) -> None:
    program, _ = check(Gpt(), Mesh.of(dp=4), zero(stage, bucket), [BucketCollectives()])
    limit = BUCKETS[bucket].count
    for held in program.buckets:
        assert len(held.fqns) == 1 or (held.length - 3) * held.dtype.itemsize <= limit


def test_parameters_gathered_once_per_step() -> None:
    block = zero(3, reshard_after_forward="step")
    program, _ = check(Gpt(), Mesh.of(pp=2, dp=2), block, [BucketCollectives()])
    assert "U" in program.stages[0].phases


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_frozen_parameters_are_never_reduced(stage: int) -> None:
    program, step = check(Frozen(), Mesh.of(dp=2), zero(stage), [BucketCollectives()], vectors)
    frozen = {b.name for b in program.buckets if "a.weight" in b.fqns}
    assert frozen == {"s0.root:frozen"}
    assert "a.weight" not in step.grads


def test_weight_gradients_apart_are_reduced_in_their_own_phase() -> None:
    mesh = Mesh.of(pp=2, dp=2)
    check(Gpt(), mesh, zero(3), [BucketCollectives()], weights="apart")


def test_small_parameters_stay_whole_and_are_right() -> None:
    block = zero(3, param_persistence_threshold=Size(1024))
    program, _ = check(Gpt(), Mesh.of(dp=2), block, [BucketCollectives()])
    whole = {fqn for b in program.buckets if b.axis is None for fqn in b.fqns}
    assert "ln_f.weight" in whole and "h.0.up.weight" not in whole


def test_overlapped_gathers_of_two_stages_give_eager_gradients() -> None:
    check(Gpt(), Mesh.of(pp=2, dp=2), zero(3, "medium", prefetch=1), OVERLAP)


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_overlapped_reductions_of_lower_stages_give_eager_gradients(stage: int) -> None:
    check(Gpt(), Mesh.of(pp=2, dp=2), zero(stage, "medium"), OVERLAP)
