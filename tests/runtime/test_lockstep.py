"""The executor in lock step against a plain process, and lock step's own detection of faults."""

import pytest
import torch

from autoshard.diagnostics import RuntimeMismatchError, VerifyError
from autoshard.mesh import Mesh
from autoshard.runtime.work import Transfer
from autoshard.testing.lockstep import adamw, run_lockstep, run_ranks, run_virtual
from tests.runtime.toy import Toy, reference_loss

LAYOUTS = [
    dict(),
    dict(m=3),
    dict(tp=2, m=2),
    dict(tp=4),
    dict(pp=2, m=4),
    dict(pp=2, m=1),
    dict(pp=2, m=4, schedule="gpipe"),
    dict(dp=2, m=2),
    dict(dp=3, zero=0),
    dict(dp=2, zero=1, m=2),
    dict(dp=3, zero=1, m=2),
    dict(dp=2, zero=3, m=2),
    dict(dp=3, zero=3),
    dict(dp=2, pp=2, tp=2, zero=3, m=3),
    dict(dp=2, pp=2, tp=2, zero=1, m=3),
]


def close(a, b):
    return (a - b).abs().max() <= 1e-10 * (b.abs().max() + 1e-6)


def train_plainly(toy, batches, max_norm):
    params = {n: torch.nn.Parameter(v.clone()) for n, v in toy.values().items()}
    optimizer = adamw(params.values())
    for batch in batches:
        loss = reference_loss(params, batch)
        optimizer.zero_grad()
        loss.backward()
        grads = {n: p.grad.clone() for n, p in params.items()}
        norm = torch.nn.utils.clip_grad_norm_(params.values(), max_norm)
        optimizer.step()
        yield loss.detach(), grads, norm, {n: p.detach().clone() for n, p in params.items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_steps_equal_those_of_one_plain_process(layout):
    toy = Toy(**layout)
    batches = toy.batches()
    records = run_lockstep(toy.program(), toy.values(), batches, max_norm=0.1)
    for record, plain in zip(records, train_plainly(toy, batches, 0.1), strict=True):
        loss, grads, norm, params = plain
        assert close(record.loss, loss)
        assert close(record.norm, norm)
        for name in grads:
            assert close(record.grads[name], grads[name]), name
            assert close(record.params[name], params[name]), name


def test_three_rounds_of_a_third_equal_one_big_batch():
    toy = Toy(pp=2, dp=2, zero=1, m=4)
    batches = [[{k: v.abs() for k, v in b.items()} for b in step] for step in toy.batches(3)]
    rounds = run_lockstep(toy.program(), toy.values(), batches, optimizer=None, weights=[1 / 3] * 3)
    params = {n: torch.nn.Parameter(v.clone()) for n, v in toy.values().items()}
    reference_loss(params, [b for step in batches for b in step]).backward()
    for name, param in params.items():
        assert close(rounds[-1].grads[name], param.grad)


def test_ranks_that_disagree_on_a_collective_are_named():
    def body(comm):
        shape = 3 if comm.rank == 1 else 2
        return comm.all_reduce_start(torch.ones(shape), "tp").wait()

    with pytest.raises(RuntimeMismatchError, match="rank 1 and rank 0 disagree") as caught:
        run_virtual(Mesh.of(tp=2), body)
    assert "rank 1 calls all_reduce(sum) over 'tp' of float32[3]" in str(caught.value)


def test_a_collective_that_one_rank_leaves_out_is_a_deadlock_found_at_once():
    def body(comm):
        if comm.rank != 2:
            comm.all_reduce_start(torch.ones(1), "tp").wait()

    with pytest.raises(RuntimeMismatchError, match="deadlock") as caught:
        run_virtual(Mesh.of(tp=3), body)
    assert "rank 2 has finished" in str(caught.value)
    assert "rank 0 waits for all_reduce" in str(caught.value)


def test_a_message_that_nobody_receives_is_told():
    def body(comm):
        if comm.rank == 0:
            comm.transfer_start([Transfer(True, torch.ones(1), "pp", 1, 7)])

    with pytest.raises(RuntimeMismatchError, match="left over"):
        run_virtual(Mesh.of(pp=2), body)


def test_an_input_changed_before_the_wait_is_told():
    def body(comm):
        value = torch.ones(2)
        work = comm.all_reduce_start(value, "dp")
        value.add_(1)
        work.wait()

    with pytest.raises(RuntimeMismatchError, match="changed the input"):
        run_virtual(Mesh.of(dp=2), body)


def test_a_received_buffer_is_nan_until_it_is_waited_for():
    def body(comm):
        buffer = torch.zeros(2)
        transfer = Transfer(
            comm.rank == 0, torch.ones(2) if comm.rank == 0 else buffer, "pp", 1 - comm.rank, 3
        )
        (work,) = comm.transfer_start([transfer])
        before = buffer.clone()
        return before, work.wait()

    _, (before, after) = run_virtual(Mesh.of(pp=2), body)
    assert before.isnan().all() and torch.equal(after, torch.ones(2))


def test_replicas_that_differ_are_told():
    toy = Toy(dp=2)
    from autoshard.testing.assemble import assemble

    def body(exe):
        parts = {n: p.detach().clone() for n, p in exe.storage.parameters.items()}
        parts["a.weight"][0, 0] += exe.comm.rank
        return parts

    executables, parts = run_ranks(toy.program(), toy.values(), body)
    with pytest.raises(VerifyError, match=r"ranks 0 and 1 hold different 'a\.weight'"):
        assemble(executables, parts)


def test_the_first_error_of_a_rank_is_the_one_raised():
    def body(comm):
        if comm.rank == 1:
            raise ValueError("mine")
        comm.all_reduce_start(torch.ones(1), "tp").wait()

    with pytest.raises(ValueError, match="mine"):
        run_virtual(Mesh.of(tp=2), body)
