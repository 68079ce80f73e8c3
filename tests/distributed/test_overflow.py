"""fp16 on real gloo ranks: where one rank overflows all skip, and the next step is right."""

from unittest import mock

import pytest

import autoshard
from autoshard.runtime.gradients import Gradients
from autoshard.testing.lockstep import adamw
from autoshard.testing.models import tiny_mlp
from autoshard.testing.processes import run_processes

pytestmark = pytest.mark.distributed

DP, STEPS = 2, 4
HOT = 1  # the step in which the last data parallel rank's numbers overflow
PLANTED = 3  # the step in which one number is infinite, in what the last rank alone holds
PLAN = """autoshard 1
mesh {{ {mesh}, dp = 2 }}
batch {{ micro_batch_size = 2, num_microbatches = 2 }}
{more}
zero {{ stage = {zero}, param_persistence_threshold = 0KiB }}
precision {{ params = fp16, loss_scale = dynamic }}
"""
LAYOUTS = {
    "dp, zero 3": ("tp = 1", "", 3),
    "dp x tp, zero 2": ("tp = 2", "tensor { up: colwise, down: rowwise }", 2),
    "dp x pp, zero 1": ("pp = 2", "pipeline { split = before(down) }", 1),
}


def plan(name):
    mesh, more, zero = LAYOUTS[name]
    return PLAN.format(mesh=mesh, more=more, zero=zero)


def batches():
    """Return global batches; in one of them the last rank's numbers are too large for fp16."""
    _, batch, _ = tiny_mlp(batch=4 * DP)
    hot = batch["x"].clone()
    hot[4:] *= 1e6
    return [{**batch, "x": hot} if step == HOT else batch for step in range(STEPS)]


def finish_infinite(gradients, finish=Gradients.finish):
    """Return the finished gradients of a rank, the first number of them infinite."""
    results = finish(gradients)
    results[0].view(-1)[0] = float("inf")
    return results


def train(name, rank, world):
    """Return of every step loss, gradients, scales, parameters, and whether own ones changed."""
    model, _, loss = tiny_mlp(batch=4 * DP)
    made = batches()
    example = {key: value[:4] for key, value in made[0].items()}
    engine = autoshard.parallelize(model, plan(name), example=example, loss=loss, verify=False)
    optimizer, found = adamw(engine.parameters()), []
    for step, batch in enumerate(made):
        first = 4 * engine.dp_rank
        own = {k: v[first : first + 4] for k, v in batch.items()}
        before = [p.detach().clone() for p in engine.parameters()]
        is_planted = step == PLANTED and rank == world - 1
        finish = finish_infinite if is_planted else Gradients.finish
        with mock.patch.object(Gradients, "finish", finish):
            loss = engine.forward_backward(own)
        has_grads = any(p.grad is not None for p in engine.parameters())
        optimizer.step()
        optimizer.zero_grad()
        changed = any(not p.equal(old) for p, old in zip(engine.parameters(), before, strict=True))
        state = engine.full_state_dict()
        saved = state._metadata["autoshard"]["loss_scale"] if state else None
        scale = engine.stats()["loss_scale"]
        values = {key: value.tolist() for key, value in state.items()}
        found.append((loss.item(), has_grads, scale, saved, values, changed))
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_skip_a_step_in_which_one_overflows(name):
    world = DP if name.startswith("dp,") else 2 * DP
    ranks = run_processes(world, lambda rank: train(name, rank, world), 120)
    scales = [[step[2] for step in rank] for rank in ranks]
    start = scales[0][0]
    assert scales == [[start, start / 2, start / 2, start / 4]] * world
    for which in (1, 5):  # gradients came, own parameters changed
        seen = [[step[which] for step in rank] for rank in ranks]
        assert seen == [[True, False, True, False]] * world
    before, skipped, after, last = (step[4] for step in ranks[0])
    assert [step[3] for step in ranks[0]] == scales[0]  # a checkpoint has it
    assert before == skipped != after == last
    model, _, loss = tiny_mlp(batch=4 * DP)
    expected = autoshard.lockstep(model, plan(name), batches(), loss=loss)
    for step in (0, 2):
        assert {rank[step][0] for rank in ranks} == {expected[step].loss.item()}
        for key, value in expected[step].params.items():
            assert ranks[0][step][4][key] == value.tolist(), (step, key)
