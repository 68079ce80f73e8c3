"""Generated code: readable, right, and free of values that nobody reads any more."""

import gc
import inspect
import operator
import weakref

import pytest
import torch
from torch.fx import Graph
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.diagnostics import InternalError
from autoshard.ir.graph_function import (
    BATCH,
    FLAT_GRAD,
    GRAD,
    LOSS,
    SAVED,
    GraphFunction,
    Port,
)
from autoshard.ir.lifetimes import lifetimes
from autoshard.ops import add_rms_norm as ops
from autoshard.ops.collectives import pack
from autoshard.runtime.codegen import RUN_AS, generate, write
from tests.runtime.toy import Builder

aten = torch.ops.aten
MODE = torch._subclasses.FakeTensorMode()


def test_the_text_is_one_call_a_line_with_dead_values_deleted():
    b = Builder(MODE)
    x = b.input(BATCH, "x", 2, 3)
    y = b.call(aten.tanh.default, x)
    z = b.call(aten.mul.Tensor, y, x)
    text, bindings = write(b.build((LOSS, "", z)), "stage0.F")
    assert text.splitlines() == [
        "def stage0_F(comm, args):",
        "    (batch_x,) = args",
        "    args.clear()",
        "    tanh_default = aten_tanh_default(batch_x)",
        "    mul_tensor = aten_mul_Tensor(tanh_default, batch_x); del batch_x, tanh_default",
        "    return (mul_tensor,)",
    ]
    assert bindings["aten_tanh_default"] is aten.tanh.default


def test_the_source_of_a_generated_function_can_be_inspected():
    b = Builder(MODE)
    function = b.build((LOSS, "", b.call(aten.neg.default, b.input(BATCH, "x", 2))))
    assert "aten_neg_default(batch_x)" in inspect.getsource(generate(function, "F"))


def test_getitem_none_and_constants_are_written_as_literals():
    b = Builder(MODE)
    x = b.input(BATCH, "x", 4, 3)
    parts = b.graph.call_function(aten.split.Tensor, (x, 2))
    first = b.graph.call_function(operator.getitem, (parts, 1))
    full = b.graph.call_function(
        aten.full.default,
        ([2], float("inf")),
        {"dtype": torch.float32, "device": x.meta["val"].device},
    )
    b.graph.output((first, None, full))
    ports = (Port(LOSS), Port(SAVED, "n"), Port(SAVED, "f"))
    call = generate(GraphFunction(b.graph, tuple(b.ports), ports), "F")

    class Comm:
        device = torch.device("cpu")

    data = torch.arange(12.0).view(4, 3)
    half, nothing, infinite = call(Comm, [data])
    assert torch.equal(half, data[2:])
    assert nothing is None
    assert infinite.isinf().all() and infinite.dtype == torch.float32


def test_a_value_dies_right_after_its_last_use():
    seen = []

    def probe(value):
        gc.collect()
        seen.append([ref() is not None for ref in refs])
        return value

    b = Builder(MODE)
    x = b.input(BATCH, "x", 2)
    y = b.call(aten.neg.default, x)
    z = b.graph.call_function(probe, (y,))
    b.graph.output((z,))
    call = generate(GraphFunction(b.graph, tuple(b.ports), (Port(LOSS),)), "F")
    value = torch.ones(2)
    refs = [weakref.ref(value)]
    args = [value]
    del value
    call(None, args)
    assert seen == [[False]]
    assert args == []


def test_names_that_clash_with_ours_are_changed():
    b = Builder(MODE)
    x = b.graph.placeholder("comm")
    y = b.graph.placeholder("aten_add_Tensor")
    total = b.graph.call_function(aten.add.Tensor, (x, y))
    b.graph.output((total,))
    call = generate(
        GraphFunction(b.graph, (Port(BATCH, "x"), Port(BATCH, "y")), (Port(LOSS),)), "F"
    )
    assert call(None, [torch.tensor(1.0), torch.tensor(2.0)])[0] == 3.0


def test_a_graph_with_other_nodes_is_refused():
    graph = Graph()
    graph.get_attr("weight")
    graph.output(())
    with pytest.raises(InternalError, match="get_attr"):
        generate(GraphFunction(graph, (), ()), "F")


def test_the_kernels_of_fused_ops_are_chosen_when_code_is_made():
    b = Builder(MODE)
    x, weight = b.input(BATCH, "x", 2, 8), b.input(BATCH, "w", 8)
    both = b.call(torch.ops.autoshard.add_rms_norm.default, x, x, weight, 1e-6)
    function = b.build((LOSS, "", b.call(operator.getitem, both, 0)))
    for kernels, wanted in (("auto", ops.forward), ("reference", ops.reference_forward)):
        _, bindings = write(function, "F", kernels)
        assert bindings["add_rms_norm"] is wanted


def test_gradients_are_given_away_or_written_into_their_bucket_once_they_are_made():
    b = Builder(MODE)
    x = b.input(BATCH, "x", 2)
    own = b.call(aten.neg.default, x)
    first, second = b.call(aten.tanh.default, x), b.call(aten.exp.default, x)
    bucket = b.call(pack, [first, second], 5)
    text, _ = write(b.build((GRAD, "w", own), (FLAT_GRAD, "s0", bucket)), "W")
    assert [line.strip() for line in text.splitlines()] == [
        "def W(comm, args, give):",
        "(batch_x,) = args",
        "args.clear()",
        "neg_default = aten_neg_default(batch_x)",
        "give('w', neg_default); del neg_default",
        "tanh_default = aten_tanh_default(batch_x)",
        "pack_default = open_bucket(tanh_default, 5, 4)",
        "write_into(pack_default, 0, tanh_default); del tanh_default",
        "exp_default = aten_exp_default(batch_x)",
        "write_into(pack_default, 2, exp_default); del batch_x, exp_default",
        "return (None, pack_default)",
    ]


def test_a_bucket_is_made_after_the_gradients_of_others_that_come_between_its_own():
    b = Builder(MODE)
    x = b.input(BATCH, "x", 2)
    grads = [b.call(op, x) for op in (aten.neg.default, aten.tanh.default, aten.exp.default)]
    outer, inner = b.call(pack, grads[::2], 4), b.call(pack, grads[1:2], 2)
    function = b.build((FLAT_GRAD, "outer", outer), (FLAT_GRAD, "inner", inner))
    made = {w.bucket: at for at, ws in lifetimes(function).writes.items() for w in ws if w.is_first}
    assert made == {outer: grads[2], inner: grads[1]}
    value = torch.ones(2)
    found = generate(function, "W")(None, [value])
    assert torch.equal(found[0], torch.cat([-value, value.exp()]))
    assert torch.equal(found[1], value.tanh())


X = torch.arange(6.0).reshape(2, 3)
ARGUMENTS = {
    aten.addmm.default: (torch.ones(2), X, X.T),
    aten.bmm.default: (X[None], X.T[None]),
    aten.cat.default: ([X, X], 1),
    aten.mm.default: (X, X.T),
    aten.permute.default: (X, [1, 0]),
    aten.sum.dim_IntList: (X, [0], True),
    aten.transpose.int: (X, 0, 1),
    aten.unsqueeze.default: (X, 0),
    **{getattr(aten, name).Tensor: (X, 2) for name in ("add", "sub", "mul", "div")},
    **{getattr(aten, name).default: (X,) for name in ("t", "clone", "exp")},
}
RESHAPES = (aten.view.default, aten.reshape.default)


class Recorded(TorchDispatchMode):
    """Notes the first operator that is dispatched."""

    first = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.first = self.first or func
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("op", [op for op in RUN_AS if op not in RESHAPES], ids=str)
def test_what_is_called_for_an_operator_is_that_operator(op):
    with Recorded() as seen, torch.no_grad():
        RUN_AS[op](*ARGUMENTS[op])
    assert seen.first is op


@pytest.mark.parametrize("op", RESHAPES, ids=str)
def test_a_view_of_what_can_not_be_viewed_is_a_copy(op):
    assert torch.equal(RUN_AS[op](X.T, [6]), X.T.flatten())
