"""Collectives and the hand-lowered toy on real gloo ranks, compared with lock step bit for bit."""

import torch
import torch.distributed as dist

from autoshard.mesh import Mesh
from autoshard.runtime.batch import split_leaves
from autoshard.runtime.clip import clip_grad_norm
from autoshard.runtime.comm import ProcessGroups
from autoshard.runtime.control import Control
from autoshard.runtime.init import fill
from autoshard.runtime.link import link
from autoshard.runtime.start import connect
from autoshard.runtime.state_dict import gather_state, load_state
from autoshard.runtime.work import Transfer
from autoshard.testing.lockstep import adamw, run_lockstep, run_virtual
from tests.distributed.launch import say
from tests.runtime.toy import Toy

CPU = torch.device("cpu")
TOYS = [
    dict(dp=2, pp=2, zero=3, m=3),
    dict(dp=2, pp=2, zero=1, m=3),
    dict(tp=2, pp=2, m=2),
    dict(dp=4, zero=0, m=2),
    dict(dp=4, zero=3),
]


def exercise(comm):
    """Call every collective in every shape of interest; return the results."""
    generator = torch.Generator().manual_seed(comm.index("tp"))
    results = []
    for shape in [(), (3,), (4, 5), (40_000,), (12_001,)]:
        value = torch.randn(shape, generator=generator)
        size = comm.size("tp")
        works = [
            comm.all_reduce_start(value, "tp"),
            comm.all_reduce_start(value, "tp", "max"),
            comm.all_gather_start(value, "tp"),
            comm.reduce_scatter_start(torch.stack([value * (i + 1) for i in range(size)]), "tp"),
        ]
        results += [work.wait() for work in reversed(works)]
        results.append(comm.broadcast(value, "tp", size - 1))
    results.append(comm.all_reduce_start(torch.arange(5) * comm.index("tp"), "tp").wait())
    return results


def subset(comm):
    """Reduce over the first and last pipeline rank only, while messages cross."""
    value = torch.full((3,), 1.0 + comm.index("pp"))
    members = (0, comm.size("pp") - 1)
    if comm.index("pp") in members:
        return comm.all_reduce_start(value, "pp", members=members).wait()
    return value


def ring(comm):
    """Send a value to the next pipeline rank and receive one from the one before."""
    me, size = comm.index("pp"), comm.size("pp")
    out, into = torch.full((2,), float(me)), torch.empty(2)
    works = comm.transfer_start(
        [
            Transfer(True, out, "pp", (me + 1) % size, 5),
            Transfer(False, into, "pp", (me - 1) % size, 5),
        ]
    )
    return [work.wait() for work in works][1]


def check_collectives(control):
    for mesh, body in [(Mesh.of(tp=4), exercise), (Mesh.of(pp=4), subset), (Mesh.of(pp=4), ring)]:
        mine = body(ProcessGroups(mesh, control.rank, CPU))
        theirs = run_virtual(mesh, body)[control.rank]
        pairs = zip(mine, theirs, strict=True) if isinstance(mine, list) else [(mine, theirs)]
        for a, b in pairs:
            assert torch.equal(a, b), (body.__name__, a, b)


def check_toys(control):
    for layout in TOYS:
        toy = Toy(**layout)
        program, batches = toy.program(), toy.batches(3)
        exe = link(program, ProcessGroups(program.mesh, control.rank, CPU))
        assert not fill(program, exe.storage, toy.values(), None, control, 0)
        expected = run_lockstep(toy.program(), toy.values(), batches, max_norm=0.1)
        optimizer = adamw(exe.storage.parameters.values())
        for step, batch in enumerate(batches):
            leaves = batch[exe.comm.index("dp")]
            loss = exe.step(split_leaves(leaves, program.leaves, program.num_microbatches))
            norm = clip_grad_norm(exe.storage, exe.comm, 0.1)
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(loss, expected[step].loss), layout
            assert torch.equal(norm, expected[step].norm), layout
        names = tuple(toy.values())
        state = gather_state(program, exe.storage, exe.comm, names)
        for name, value in state.items():
            assert torch.equal(value, expected[-1].params[name]), (layout, name)
        check_reload(control, program, exe, names, state)


def check_reload(control, program, exe, names, state):
    assert bool(state) == (control.rank == 0)
    doubled = {name: 2 * value for name, value in state.items()}
    load_state(program, exe.storage, control, names, doubled)
    again = gather_state(program, exe.storage, exe.comm, names)
    for name, value in again.items():
        assert torch.equal(value, doubled[name]), name


def main():
    torch.set_num_threads(1)
    control = connect(CPU)
    assert isinstance(control, Control) and control.size == 4
    check_collectives(control)
    check_toys(control)
    dist.barrier()
    say(done=True)


main()
