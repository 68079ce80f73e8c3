"""Offloaded buckets: a CPU has nothing to do, a device with memory of its own fresh copies."""

from contextlib import contextmanager

import pytest
import torch

import autoshard
from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.mesh import Mesh
from autoshard.runtime.comm import ProcessGroups
from autoshard.runtime.nccl import NcclAxis
from autoshard.runtime.offload import HostMemory
from autoshard.runtime.storage import Storage
from autoshard.runtime.work import Ready
from autoshard.source import Source
from autoshard.testing.lockstep import run_ranks
from autoshard.testing.models import tiny_mlp
from autoshard.testing.rendezvous import Rendezvous

CPU = torch.device("cpu")
OFF, BOTH = "", "offload_optimizer = cpu, offload_params = cpu"
HALF = "precision { params = bf16 }"
PLAN = """autoshard 1
mesh {{ dp = {dp} }}
batch {{ micro_batch_size = 1, num_microbatches = 2 }}
zero {{ stage = {stage}, param_persistence_threshold = 0KiB
{offload}
}}
{more}
"""


def train(stage, offload, more=""):
    model, batch, loss = tiny_mlp()
    plan = PLAN.format(dp=2, stage=stage, offload=offload, more=more)
    return autoshard.lockstep(model, plan, [batch] * 3, loss=loss, max_norm=0.1)


def is_same(ours, theirs):
    """Tell whether two runs are equal bit for bit."""
    return all(
        torch.equal(a.loss, b.loss)
        and torch.equal(a.norm, b.norm)
        and all(torch.equal(a.params[n], b.params[n]) for n in b.params)
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.fixture
def apart(monkeypatch):
    """Give every virtual rank a device whose memory is not the host's."""
    start = Rendezvous.__init__

    def with_host(self, hub, rank):
        start(self, hub, rank)
        self.host = HostMemory(CPU)

    monkeypatch.setattr(Rendezvous, "__init__", with_host)
    return monkeypatch


@pytest.mark.parametrize("more", ("", HALF), ids=("fp32", "bf16"))
@pytest.mark.parametrize("stage", (0, 1, 3))
def test_offloading_changes_no_bit(stage, more, apart):
    away = train(stage, BOTH, more)
    apart.undo()
    kept = train(stage, OFF, more)
    assert is_same(away, kept) and is_same(train(stage, BOTH, more), kept)


@pytest.mark.parametrize("more", ("", HALF), ids=("fp32", "bf16"))
def test_a_copy_that_is_not_renewed_is_seen(more, apart):
    send, kept = Storage.send, train(1, OFF, more)
    sent = set()

    def send_once(self):
        if id(self) not in sent:
            sent.add(id(self))
            send(self)

    apart.setattr(Storage, "send", send_once)
    assert not is_same(train(1, BOTH, more), kept)


def test_only_what_the_plan_names_is_stored_apart(apart):
    model, batch, loss = tiny_mlp()
    model.down.bias.requires_grad_(False)
    where = {}
    for offload in ("offload_optimizer = cpu", "offload_params = cpu"):
        plan = load(Source("p", PLAN.format(dp=2, stage=3, offload=offload, more=""))).require()
        program = compile_plan(model, plan, batch, loss).program
        buckets = {fqn: b for b in program.buckets for fqn in b.fqns}
        where[offload] = {n: (b.on_host, b.is_fetched) for n, b in buckets.items()}
        exes, _ = run_ranks(program, {}, lambda exe: exe.storage.send())
        for name, bucket in exes[0].storage.layout.buckets.items():
            is_copy = exes[0].storage.flat(name) is not exes[0].storage.stored[name]
            assert is_copy == (bucket.on_host and not bucket.is_fetched)
    assert where["offload_optimizer = cpu"]["up.weight"] == (True, False)
    assert where["offload_optimizer = cpu"]["down.bias"] == (False, False)
    assert set(where["offload_params = cpu"].values()) == {(True, True)}


class Recorder(NcclAxis):
    """An axis and a host memory that note what is asked of them, in order."""

    def __init__(self):
        self._size, self.done, self.copying = 2, [], False

    def room_for(self, value, device):
        self.done.append("room")
        return super().room_for(value, device)

    def fetch(self, value):
        self.done.append("copy")
        return value.clone()

    @contextmanager
    def stream(self):
        self.copying = True
        yield
        self.copying = False

    def all_gather(self, value, out=None):
        self.done.append(f"gather, {'on' if self.copying else 'not on'} the stream of copies")
        assert out.shape == (2, *value.shape)
        return Ready(out)


def test_a_gather_from_the_host_makes_its_result_before_the_copy_follows():
    """Memory that is made behind the copy could still be read by what was launched before."""
    groups, axis = object.__new__(ProcessGroups), Recorder()
    groups.mesh, groups.rank, groups.device = Mesh.of(dp=2), 0, CPU
    groups.host, groups._axes = axis, {"dp": axis}
    groups.all_gather_start(torch.ones(4), "dp").wait()
    assert axis.done == ["room", "copy", "gather, on the stream of copies"]


def test_on_a_cpu_the_report_says_that_there_is_nothing_to_do():
    model, batch, loss = tiny_mlp()
    batch = {name: value[:2] for name, value in batch.items()}
    plan = PLAN.format(dp=1, stage=0, offload="offload_optimizer = cpu", more="")
    engine = autoshard.parallelize(model, plan, example=batch, loss=loss)
    assert "offload    nothing to do: this rank computes on the CPU" in str(engine.report())
    compiled = compile_plan(model, load(Source("p", plan)).require(), batch, loss)
    (remark,) = [str(r) for r in compiled.remarks if "host memory" in str(r)]
    assert "4 of 4 stay in host memory on CUDA" in remark and "nothing moves" in remark
