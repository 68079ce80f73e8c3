"""Prefetch, buckets, resharding and kinds of parameters: every pair of settings, in lock step.

Nine rows cover all pairs of four settings of three values. Each equals the captured model in
float64, and without prefetch it is equal bit for bit.
"""

from functools import cache

import pytest
import torch

from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.batch import batch_leaves, share_leaves
from autoshard.ir.capture import capture
from autoshard.ir.promote import promote, promote_values
from autoshard.mesh import Mesh
from autoshard.source import Source
from autoshard.testing.equivalence import TOLERANCE, compare_compiled, held_values, reference_run
from autoshard.testing.lockstep import StepRecord, run_lockstep
from tests.bank.odd import odd

DP, STEPS = 3, 2  # three ranks: no bucket is a multiple of that
KINDS = ("tied", "uneven", "frozen")
BUCKETS = {"tiny": "1B", "medium": "400B", "one": "1MiB"}
DEPTHS = (0, 1, 4)
RESHARD = ("on", "off", "step")
ROWS = [
    (KINDS[i], list(BUCKETS)[j], DEPTHS[(i + j) % 3], RESHARD[(i + 2 * j) % 3])
    for i in range(3)
    for j in range(3)
]
PLAN = """autoshard 1
mesh {{ dp = {dp} }}
batch {{ micro_batch_size = 1, num_microbatches = 2 }}
zero {{
  stage = {stage}, units = blocks.*, param_persistence_threshold = 0KiB
  gather_bucket = {bucket}, reduce_bucket = {bucket}
  {more}
}}
"""


@cache
def captured(kind: str):
    return promote(capture(*odd(kind, 1), mesh=Mesh(()), compare=False))


@cache
def reference(kind: str):
    return reference_run(*odd(kind, 2 * DP), steps=STEPS)


def compiled(kind: str, stage: int, bucket: str, more: str = ""):
    text = PLAN.format(dp=DP, stage=stage, bucket=BUCKETS[bucket], more=more)
    plan = load(Source("p.plan", text)).require()
    model, batch, loss = odd(kind, 2 * DP)
    known = captured(kind)
    return compile_plan(model, plan, batch, loss, captured=known, check=False).program


def assert_equal(kind: str, program) -> tuple[StepRecord, ...]:
    model, batch, _ = odd(kind, 2 * DP)
    comparison = compare_compiled(program, model, batch, reference(kind))
    wrong = comparison.first_wrong(TOLERANCE)
    assert wrong is None, f"{wrong} (worst: {comparison.worst})"
    return comparison.ours


def order(program) -> list[object]:
    return [node.target for node in program.stages[0].phases["F"].graph.nodes]


@pytest.mark.parametrize(("kind", "bucket", "depth", "reshard"), ROWS)
def test_stage_3_with_and_without_prefetch(kind, bucket, depth, reshard) -> None:
    settings = f"reshard_after_forward = {reshard}, prefetch = "
    program = compiled(kind, 3, bucket, settings + str(depth))
    ours = assert_equal(kind, program)
    if depth == 0 or reshard == "step":
        return
    late = compiled(kind, 3, bucket, settings + "0")
    assert order(program) != order(late)
    model, batch, _ = odd(kind, 2 * DP)
    values = held_values(model, late, torch.float64)
    shares = share_leaves(promote_values(batch_leaves(batch), torch.float64), DP)
    for a, b in zip(ours, run_lockstep(late, values, [shares] * STEPS, max_norm=1.0), strict=True):
        assert torch.equal(a.loss, b.loss) and torch.equal(a.norm, b.norm)
        assert all(torch.equal(a.grads[n], b.grads[n]) for n in b.grads)
        assert all(torch.equal(a.params[n], b.params[n]) for n in b.params)


@pytest.mark.parametrize(("kind", "bucket"), [(k, b) for k, b, *_ in ROWS])
def test_stages_1_and_2_have_buckets_only(kind: str, bucket: str) -> None:
    stage = 1 + (KINDS.index(kind) + list(BUCKETS).index(bucket)) % 2
    assert_equal(kind, compiled(kind, stage, bucket))
