"""Where starts, waits and releases stand, and that moving them changes no bit."""

from itertools import pairwise

import pytest
import torch

from autoshard.cost.traffic import traffic
from autoshard.diagnostics import PlanError
from autoshard.ir.graph_function import FLAT, SAVED
from autoshard.ir.node_info import info
from autoshard.mesh import Mesh
from autoshard.ops import collectives as ops
from autoshard.passes._gathers import find_gathers
from autoshard.passes.bucket_collectives import BucketCollectives
from autoshard.passes.keep_gathers import KeepGathers
from autoshard.passes.lower_schedule import LowerSchedule
from autoshard.passes.prefetch_gathers import PrefetchGathers
from autoshard.passes.split_phases import SplitPhases
from autoshard.units import Size
from tests.passes.evaluate import run_step
from tests.passes.programs import before, compile_with, context, leaves, state_of
from tests.passes.test_zero_equals_autograd import OVERLAP, PASSES, ShardStorage, zero
from tests.passes.toys import Gpt, token_batch


def build(passes, stage: int = 3, **settings: object):
    """Return an untied GPT on two dp ranks after ZeRO and ``passes``, with its remarks."""
    settings.setdefault("prefetch", 0)
    ctx = context(Mesh.of(dp=2), zero=zero(stage, **settings), pipeline=before())
    passes = (*PASSES, ShardStorage(), *passes)
    return compile_with(passes, Gpt(tied=False), token_batch(), ctx), ctx.remarks


def events(function) -> list[str]:
    """Return starts, waits and releases of gathers in order: "start h.0", "wait h.0" ..."""
    flats = {node: name.removeprefix("s0.") for name, node in function.named(FLAT).items()}
    found, named = [], {}
    for node in function.graph.nodes:
        if node.target is ops.all_gather_start:
            named[node] = flats[node.args[0]]
            found.append(f"start {named[node]}")
        elif node.target is ops.wait and node.args[0] in named:
            named[node] = named[node.args[0]]
            found.append(f"wait {named[node]}")
        elif node.target is ops.release:
            found.append(f"release {named[node.args[0]]}")
    return found


ALL = (*OVERLAP, LowerSchedule(), KeepGathers())
START = ops.reduce_scatter_start
UNITS = ["root", "h.0", "h.1", "h.2", "root#2"]


def test_without_prefetch_each_gather_starts_where_it_is_needed() -> None:
    program, _ = build(OVERLAP)
    found = events(program.stages[0].phases["F"])
    assert found == [f"{what} {u}" for u in UNITS for what in ("start", "wait", "release")]


def test_prefetch_starts_the_next_unit_before_this_one_computes() -> None:
    program, _ = build(OVERLAP, prefetch=1)
    found = events(program.stages[0].phases["F"])
    assert found[:3] == ["start root", "start h.0", "wait root"]
    for earlier, later in pairwise(UNITS):
        assert found.index(f"start {later}") < found.index(f"wait {earlier}")
        assert found.index(f"release {earlier}") < found.index(f"wait {later}")


def test_backward_gathers_in_its_own_order() -> None:
    program, _ = build(OVERLAP, prefetch=1)
    found = events(program.stages[0].phases["I"])
    starts = [e.removeprefix("start ") for e in found if e.startswith("start")]
    assert starts == ["root#2", "h.2", "h.1", "h.0"]


def test_a_limit_on_gathered_bytes_delays_starts_and_says_so() -> None:
    program, _ = build(OVERLAP[:2])
    forward = program.stages[0].phases["F"]
    limit = max(g.nbytes for g in find_gathers(forward, program))
    ctx = context(Mesh.of(dp=2), zero=zero(3, prefetch=2))
    PrefetchGathers(limit_bytes=limit).run(program, ctx)
    found = events(forward)
    assert found.index("start h.1") > found.index("wait h.0")
    said = [r.message for r in ctx.remarks if "`s0.h.1`" in r.message]
    assert said and all("starts 0 units ahead, not 2: `max_gathered = " in text for text in said)


def reasons(remarks, phase: str) -> list[str]:
    """Return why waits of a phase are exposed, in order."""
    said = [r.message for r in remarks if r.message.startswith(f"{phase} waits for a ")]
    return [text.partition("meanwhile: ")[2] for text in said]


def test_every_exposed_wait_says_what_kept_it_from_starting_earlier() -> None:
    _, without = build(ALL)
    first, *later = reasons(without, "F")
    assert first == "nothing is computed before it"
    assert later == ["`prefetch = 0` starts it no earlier"] * (len(UNITS) - 1)
    _, ahead = build(ALL, prefetch=1)
    assert reasons(ahead, "F") == ["nothing is computed before it"]
    assert reasons(ahead, "I")[-1] == "it starts with the last gradient that is computed"
    program, _ = build(OVERLAP[:2])
    least = max(g.nbytes for g in find_gathers(program.stages[0].phases["F"], program))
    _, late = build(ALL, prefetch=2, max_gathered=Size(least))
    assert reasons(late, "F")[1] == "an earlier start would pass `max_gathered`"


def test_neither_prefetch_nor_keeping_changes_a_bit() -> None:
    batches = {d: [leaves(token_batch()), leaves(token_batch())] for d in range(2)}
    steps = []
    for depth, kept, most in ((0, 0, None), (1, 0, None), (4, 0, None), (1, 8, None), (4, 99, 25)):
        limits = {"keep_gathered": Size(kept * 2**10)} | (
            {"max_gathered": Size(most * 2**10)} if most else {}
        )
        program, remarks = build(ALL, prefetch=depth, **limits)
        assert most is None or any("holds it back" in r.message for r in remarks)
        torch.manual_seed(0)
        steps.append(run_step(program, state_of(Gpt(tied=False), program), batches))
    for step in steps[1:]:
        assert torch.equal(step.loss, steps[0].loss)
        assert all(torch.equal(step.grads[n], g) for n, g in steps[0].grads.items())


def test_moving_twice_moves_no_further() -> None:
    program, _ = build(OVERLAP, prefetch=1)
    first = [events(f) for _, f in program.functions()]
    ctx = context(Mesh.of(dp=2), zero=zero(3, prefetch=1))
    for step in OVERLAP:
        step.run(program, ctx)
    assert [events(f) for _, f in program.functions()] == first


@pytest.mark.parametrize("weights", ("auto", "apart"))
def test_a_unit_is_reduced_before_the_next_one_s_gradients_are_made(weights: str) -> None:
    passes = (*PASSES[:-1], SplitPhases(weights), ShardStorage(), *OVERLAP)
    ctx = context(Mesh.of(dp=2), zero=zero(3), pipeline=before())
    program = compile_with(passes, Gpt(tied=False), token_batch(), ctx)
    phase = program.stages[0].phases["I" if weights == "auto" else "W"]
    where = [(info(n).path, n.target) for n in phase.graph.nodes]
    products = [at for at, (_, op) in enumerate(where) if op is torch.ops.aten.mm.default]
    for unit, below in (("h.2", "h.1"), ("h.1", "h.0")):
        started = where.index(next(w for w in where if w[0].startswith(unit) and w[1] is START))
        later = [at for at in products if where[at][0].startswith(below)]
        assert sum(at < started for at in later) <= 1, unit  # the input's gradient may go first


def test_reductions_start_when_their_bucket_is_full_and_few_are_under_way() -> None:
    program, _ = build(OVERLAP)
    nodes = list(program.stages[0].phases["I"].graph.nodes)
    started = most = 0
    for node in nodes:
        if node.target is ops.reduce_scatter_start:
            assert node.args[0].target is ops.pack
            started += 1
        elif node.target is ops.wait and node.args[0].target is ops.reduce_scatter_start:
            started -= 1
        most = max(most, started)
    assert most == 1 and started == 0


def test_resharding_off_hands_the_gathered_bucket_to_backward() -> None:
    program, _ = build(ALL, reshard_after_forward="off")
    backward = program.stages[0].phases["I"]
    assert not backward.named(FLAT)
    assert {"gathered:s0.h.0", "gathered:s0.root#2"} <= set(backward.named(SAVED))
    released = backward.graph.find_nodes(op="call_function", target=ops.release)
    assert len(released) == 4


def test_only_what_backward_reads_again_is_kept_gathered() -> None:
    program, _ = build(ALL, reshard_after_forward="off")
    found = events(program.stages[0].phases["F"])
    assert [e for e in found if e.startswith("release")] == ["release root"]


def test_a_budget_keeps_the_last_units_gathered() -> None:
    program, _ = build(OVERLAP)
    block = max(g.nbytes for g in find_gathers(program.stages[0].phases["F"], program))
    program, _ = build(ALL, keep_gathered=Size(2 * block))
    backward = program.stages[0].phases["I"]
    kept = {n for n in backward.named(SAVED) if n.startswith("gathered:")}
    assert kept == {"gathered:s0.root#2", "gathered:s0.h.2"}
    assert set(backward.named(FLAT)) == {"s0.h.0", "s0.h.1"}
    ctx = context(Mesh.of(dp=2), zero=zero(3, keep_gathered=Size(2 * block)))
    KeepGathers().run(program, ctx)
    assert set(backward.named(FLAT)) == {"s0.h.0", "s0.h.1"}


def test_buckets_are_named_after_their_unit_and_keep_the_model_order() -> None:
    program, _ = build([BucketCollectives()])
    assert [b.name for b in program.buckets] == [f"s0.{unit}" for unit in UNITS]
    assert program.buckets[1].fqns[:2] == ("h.0.ln.weight", "h.0.ln.bias")


def test_below_stage_three_buckets_span_units() -> None:
    program, _ = build([BucketCollectives()], stage=1)
    assert [b.name for b in program.buckets] == ["s0.root"]


def test_units_by_glob() -> None:
    program, _ = build([BucketCollectives()], units=("h.[0..1]", "h.2", "head"))
    names = [b.name for b in program.buckets]
    assert names == ["s0.root", "s0.h.0", "s0.h.1", "s0.h.2", "s0.root#2", "s0.head"]


def test_a_glob_of_units_that_names_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match=r"`g\.\*` in `units` names no module"):
        build([BucketCollectives()], units=("g.*",))


def test_training_and_evaluation_share_one_storage() -> None:
    ctx = context(Mesh.of(dp=2), zero=zero(3, "medium"), pipeline=before())
    passes = (*PASSES, ShardStorage(), *OVERLAP)
    trained, evaluated = (
        compile_with(passes, Gpt(), token_batch(), ctx, training=training)
        for training in (True, False)
    )
    assert trained.buckets == evaluated.buckets
    assert [e.storage for e in trained.params] == [e.storage for e in evaluated.params]


@pytest.mark.parametrize(
    ("stage", "settings", "times"),
    [
        (0, {}, 2),
        (1, {}, 2),
        (2, {}, 3),  # one reduction per microbatch
        (3, {}, 6),
        (3, {"reshard_after_forward": "off"}, 4),
        (3, {"reshard_after_forward": "step"}, 2),
    ],
)
def test_bytes_per_step_are_the_least_of_each_stage(stage: int, settings: dict, times: int) -> None:
    program, _ = build(ALL, stage=stage, **settings)
    size = sum(b.length * b.dtype.itemsize for b in program.buckets)
    first = program.buckets[0]
    # The embedding is gathered in forward only: backward does not read it.
    unread = first.length * first.dtype.itemsize if times == 6 else 0
    sent = sum(row.wire_bytes for row in traffic(program) if row.axis == "dp")
    expected = (times * size - program.num_microbatches * unread) // 2
    assert program.num_microbatches == 2
    assert sent == expected
