"""Messages arrive in buffers that are made once: enough of them, and never one for two values."""

import pytest
import torch

from autoshard.diagnostics import RuntimeMismatchError
from autoshard.ir import messages as plans
from autoshard.ir.messages import Inbox, inbox
from autoshard.mesh import Mesh
from autoshard.runtime import messages
from autoshard.runtime.batch import split_leaves
from autoshard.runtime.ledger import Ledger, measured
from autoshard.schedule import Kind
from autoshard.schedule.action import RECVS
from autoshard.schedule.posting import posted
from autoshard.testing.lockstep import run_lockstep, run_ranks, run_virtual
from tests.runtime.toy import Toy

SCHEDULES = ("gpipe", "1f1b", "zb_h1", "zb_h2")


def arriving_in(program, rank):
    """Yield, moment by moment, the buffers that hold a message or wait for one."""
    row = program.schedule.ranks[rank]
    box, held = inbox(program, row), {}
    for action in (action for step in posted(row) for action in step):
        if action.kind in RECVS:
            held[action.stage, action.microbatch] = box.places[action]
        # Stage 1 reads its input in F alone, stage 0 its gradient in I.
        if action.kind in ((Kind.F,) if action.stage else (Kind.I, Kind.B)):
            held.pop((action.stage, action.microbatch), None)
        yield [place for places in held.values() for place in places]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_in_flight_have_buffers_of_their_own_and_none_is_idle(schedule) -> None:
    program = Toy(pp=2, m=5, schedule=schedule).program()
    for rank in (0, 1):
        moments = list(arriving_in(program, rank))
        assert all(len(set(taken)) == len(taken) for taken in moments)
        count = len(inbox(program, program.schedule.ranks[rank]).buffers)
        assert count == max(map(len, moments)) < 5


def only_one(program, row) -> Inbox:
    """Plant a fault: every message arrives in the same buffer."""
    box = plans.inbox(program, row)
    return Inbox(box.buffers[:1], {a: (0,) * len(p) for a, p in box.places.items()})


def losses(toy: Toy) -> list[torch.Tensor]:
    records = run_lockstep(toy.program(), toy.values(), toy.batches(2))
    return [value for r in records for value in (r.loss, *r.grads.values())]


def test_one_buffer_for_all_messages_would_be_seen(monkeypatch) -> None:
    toy = Toy(pp=2, m=4)
    losses(toy)
    monkeypatch.setattr(messages, "inbox", only_one)
    with pytest.raises(RuntimeMismatchError, match="awaits two messages in one buffer"):
        losses(toy)


def test_a_value_that_is_kept_is_copied_out_of_its_buffer(monkeypatch) -> None:
    """The second stage keeps its input, as it came, for the weight gradient."""
    toy = Toy(pp=2, m=4)
    good = weight_gradient(toy)
    monkeypatch.setattr(messages.Messages, "in_buffers", lambda self, results: ())
    assert not torch.equal(weight_gradient(toy), good)


def weight_gradient(toy: Toy) -> torch.Tensor:
    """Return the gradient of the second stage's weight after one step."""
    exes, _ = run_ranks(toy.program(), toy.values(), lambda exe: one_step(exe, toy))
    assert not exes[0].wirings[0, "F"].copied
    return exes[1].storage.parameters["b.weight"].grad


def one_step(exe, toy: Toy) -> None:
    exe.step(split_leaves(toy.batches(1)[0][0], exe.program.leaves, toy.m))


def test_memory_is_the_same_after_three_steps_and_after_fifty() -> None:
    toy = Toy(pp=2, m=3, schedule="zb_h2")

    def body(exe):
        found, ledger = {}, Ledger()
        with measured([exe], ledger):
            for number in range(1, 51):
                one_step(exe, toy)
                exe.storage.drop_gradients()
                found[number] = (ledger.now, len(ledger._live))
        return found, [buffer.data_ptr() for buffer in exe.messages.buffers]

    exes, results = run_ranks(toy.program(), toy.values(), body)
    for exe, (found, places) in zip(exes, results, strict=True):
        assert found[3] == found[50] and found[3][0]["communication"] > 0
        assert places == [buffer.data_ptr() for buffer in exe.messages.buffers]


def test_a_value_that_changes_while_it_is_sent_is_told() -> None:
    def body(comm):
        if comm.rank == 1:
            transfer = messages.Transfer(False, torch.empty(2), "pp", 0, 7)
            return comm.transfer_start([transfer])[0].wait()
        value = torch.ones(2)
        (work,) = comm.transfer_start([messages.Transfer(True, value, "pp", 1, 7)])
        value.zero_()
        return work.wait()

    with pytest.raises(RuntimeMismatchError, match="changed what it sends to rank 1"):
        run_virtual(Mesh.of(pp=2), body)
