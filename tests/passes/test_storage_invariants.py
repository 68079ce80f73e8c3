"""The checkers of stored parameters and gathers reject what they should."""

import pytest

from autoshard.diagnostics import VerifyError
from autoshard.ir.graph_function import FLAT, FLAT_GRAD, PARAM, Port
from autoshard.ir.invariants import CHECKERS
from autoshard.mesh import Mesh
from autoshard.ops import collectives as ops
from autoshard.passes.keep_gathers import KeepGathers
from autoshard.passes.lower_schedule import LowerSchedule
from tests.passes.programs import before, compile_with, context
from tests.passes.test_zero_equals_autograd import OVERLAP, PASSES, ShardStorage, zero
from tests.passes.toys import Gpt, token_batch


def program(stage: int = 3, **settings: object):
    """Return an overlapped ZeRO program of two stages; all its invariants hold."""
    block = zero(stage, **settings)
    ctx = context(Mesh.of(pp=2, dp=2), zero=block, pipeline=before("h.1"))
    passes = (*PASSES, ShardStorage(), *OVERLAP, LowerSchedule(), KeepGathers())
    built = compile_with(passes, Gpt(), token_batch(), ctx)
    for check in CHECKERS.values():
        if check.__module__.startswith("autoshard.ir.invariants_"):
            check(built)
    return built


def nodes(function, op) -> list:
    """Return the nodes of one operation."""
    return function.graph.find_nodes(op="call_function", target=op)


def rejects(name: str, broken, text: str) -> None:
    """Check that the checker called ``name`` refuses, with a message that holds ``text``."""
    with pytest.raises(VerifyError) as error:
        CHECKERS[name](broken)
    assert text in str(error.value)


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_every_zero_stage_keeps_the_invariants(stage: int) -> None:
    program(stage)


@pytest.mark.parametrize("reshard", ("off", "step"))
def test_every_way_to_reshard_keeps_the_invariants(reshard: str) -> None:
    program(3, reshard_after_forward=reshard)


def test_a_shard_read_without_a_gather_is_seen() -> None:
    broken = program()
    forward = broken.stages[0].phases["F"]
    view = nodes(forward, ops.view_at)[0]
    view.args = (forward.named(FLAT)["s0.h.0"], *view.args[1:])
    rejects("gathered", broken, "reads the shard of `s0.h.0` ungathered")


def test_a_gather_that_nobody_waits_for_is_seen() -> None:
    broken = program()
    start = nodes(broken.stages[0].phases["F"], ops.all_gather_start)[0]
    for user in list(start.users):
        user.args = (start.args[0],)
    rejects("gathered", broken, "is started once but waited for 0 times")


def test_a_gradient_that_leaves_unreduced_is_seen() -> None:
    broken = program()
    function = broken.stages[0].phases["I"]
    results = list(function.results)
    index = next(i for i, port in enumerate(function.outputs) if port.kind == FLAT_GRAD)
    results[index] = nodes(function, ops.pack)[0]
    function.set_outputs(results, function.outputs)
    rejects("gathered", broken, "leaves without a reduce_scatter")


def test_a_cut_parameter_that_nothing_gathers_is_seen() -> None:
    broken = program(1)
    del broken.stages[0].phases["U"]
    rejects("gathered", broken, "whole, but only a part is stored")


def test_a_parameter_in_two_buckets_is_seen() -> None:
    broken = program()
    first, *others = broken.buckets
    broken.buckets = (first, first, *others)
    rejects("bucketed", broken, "lies in 2 buckets")


def test_a_parameter_at_the_wrong_place_is_seen() -> None:
    broken = program()
    fqn = "h.0.qkv.weight"
    storage = broken.params[fqn].storage
    broken.params.update(fqn, storage=type(storage)(storage.bucket, 7, storage.length))
    rejects("bucketed", broken, "`h.0.qkv.weight` is at s0.h.0+7, expected s0.h.0+32")


def test_a_gradient_that_is_never_reduced_is_seen() -> None:
    broken = program(0)
    del broken.stages[0].phases["R"]
    rejects("bucketed", broken, "never reduces the gradient of")


def test_a_use_after_the_release_is_seen() -> None:
    broken = program()
    forward = broken.stages[0].phases["F"]
    release = nodes(forward, ops.release)[0]
    release.args[0].append(release)
    rejects("bounded", broken, "its release is not after it")


def test_a_bucket_that_is_never_released_is_seen() -> None:
    broken = program()
    forward = broken.stages[0].phases["F"]
    forward.graph.erase_node(nodes(forward, ops.release)[0])
    rejects("bounded", broken, "its release is not after it")


def test_a_bucket_that_was_handed_on_and_is_never_released_is_seen() -> None:
    broken = program(reshard_after_forward="off")
    backward = broken.stages[0].phases["I"]
    backward.graph.erase_node(nodes(backward, ops.release)[0])
    rejects("bounded", broken, "its release is not after it")


def test_a_gather_that_is_read_beside_its_wait_is_told_by_the_check_of_releases_too() -> None:
    broken = program()
    forward = broken.stages[0].phases["F"]
    start = nodes(forward, ops.all_gather_start)[0]
    (wait,) = start.users
    next(iter(wait.users)).replace_input_with(wait, start)
    rejects("bounded", broken, "it is read by %")


def test_a_schedule_for_another_program_is_seen() -> None:
    broken = program()
    broken.stages.append(broken.stages[1])
    rejects("schedulable", broken, "the schedule has 2 stages, the program 3")


def test_parameters_are_inputs_only_below_stage_three() -> None:
    phases = program(3).stages[0].phases
    assert not phases["F"].named(PARAM)
    assert Port(FLAT, "s0.h.0") in phases["F"].inputs
    assert program(2).stages[0].phases["F"].named(PARAM)
