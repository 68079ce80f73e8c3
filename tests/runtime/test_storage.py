"""Flat buffers: views handed out, padding, shards that may be empty."""

import pytest
import torch

from autoshard.diagnostics import InternalError
from autoshard.ir.params import ParamSpec
from autoshard.ir.placement import Shard
from autoshard.runtime.batch import split_leaves
from autoshard.runtime.layout import plan_layout
from autoshard.runtime.storage import Pieces, localize
from autoshard.testing.lockstep import run_ranks
from tests.runtime.toy import Toy


def held(layout):
    toy = Toy(**layout)
    return run_ranks(toy.program(), toy.values(), lambda exe: exe.storage)[1]


def test_whole_parameters_are_views_of_one_buffer_in_their_local_shape():
    storage = held(dict(tp=2))[1]
    a, b = storage.parameters["a.weight"], storage.parameters["b.weight"]
    assert tuple(a.shape) == (2, 3) and tuple(b.shape) == (5, 2)
    assert a.is_leaf and a.requires_grad
    base = storage.stored["s0"]
    assert a.data_ptr() == base.data_ptr() and b.data_ptr() == base[6:].data_ptr()
    with torch.no_grad():
        a.fill_(7)
    assert base[:6].eq(7).all() and storage.param("a.weight").eq(7).all()


def test_sharded_parameters_are_one_dimensional_and_may_be_empty():
    storages = held(dict(dp=3, zero=3))
    sizes = [[p.numel() for p in s.parameters.values()] for s in storages]
    assert sizes == [[11, 0], [1, 10], [0, 10]]  # 12 + 20 elements and one of padding over 3
    assert all(p.dim() == 1 for s in storages for p in s.parameters.values())


def test_a_cut_bucket_must_be_gathered_before_it_is_computed_with():
    storage = held(dict(dp=2, zero=1))[0]
    with pytest.raises(KeyError):
        storage.param("a.weight")


def test_what_a_step_gathered_is_gone_after_it():
    toy = Toy(dp=2, zero=1)
    program, batches = toy.program(), toy.batches(1)

    def body(exe):
        leaves = batches[0][exe.comm.index("dp")]
        exe.step(split_leaves(leaves, program.leaves, 1))
        return exe.storage

    for storage in run_ranks(program, toy.values(), body)[1]:
        assert storage.gathered == {}
        assert storage.nbytes() == 16 * 8  # half of 32 elements


def test_a_flat_buffer_falls_apart_into_views_and_gaps():
    pieces = Pieces.of(["a", "b", "c"], [(1, 4, (2, 2)), (5, 0, (0,)), (7, 2, (2,))], 10)
    flat = torch.arange(10.0)
    views = pieces.views(flat)
    assert [views[n].tolist() for n in "abc"] == [[[1, 2], [3, 4]], [], [7, 8]]
    pieces.clear_gaps(flat)
    assert flat.tolist() == [0, 1, 2, 3, 4, 0, 0, 7, 8, 0]


def test_padding_is_zero_and_goes_again():
    spec = ParamSpec("e", (97, 4), torch.float32, padded=(100, 4), placements={"tp": Shard(0)})
    value = torch.randn(97, 4)

    class Comm:
        def index(self, axis):
            return 1

        def size(self, axis):
            return 2

    local = localize(value, spec, Comm())
    assert tuple(local.shape) == (50, 4)
    assert torch.equal(local[:47], value[50:]) and local[47:].eq(0).all()
    assert torch.equal(spec.unpad(spec.pad(value)), value)


def test_buckets_that_do_not_hold_their_parameters_are_our_bug():
    toy = Toy(dp=2, zero=1)
    program = toy.program()
    program.buckets = ()
    with pytest.raises(InternalError, match="there is none"):
        plan_layout(program, [0])
