"""The rule table is asked once per distinct call, and a call that differs is asked about."""

import pytest
import torch

from autoshard.diagnostics import PlacementError
from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir import decide
from autoshard.ir.invariants_forward import check_placed
from autoshard.ir.node_info import info
from autoshard.ir.rewrite import Rewriter
from autoshard.ops.collectives import all_reduce
from autoshard.source import Source
from autoshard.testing.models import tiny_gpt
from autoshard.testing.plans import Layout, plan_text


def program_of(layers):
    """Return a model's forward graph with its collectives, in local shapes."""
    model, batch, loss = tiny_gpt(layers=layers, batch=2, length=8)
    plan = load(Source("plan", plan_text("tiny_gpt", Layout(tp=2)))).require()
    until = "localize-shapes"
    return compile_plan(model, plan, batch, loss, until=until, check=False).program


@pytest.fixture(scope="module")
def deep():
    return program_of(6)


def asked(program, monkeypatch):
    """Return how often a check of all placements asks a rule."""
    count = []
    with monkeypatch.context() as patch:
        choose = decide.choose
        patch.setattr(decide, "choose", lambda *given: count.append(1) or choose(*given))
        check_placed(program)
    return len(count)


def test_more_equal_layers_ask_no_more(deep, monkeypatch):
    assert 0 < asked(program_of(3), monkeypatch) == asked(deep, monkeypatch)


@pytest.mark.parametrize("layer", [0, 3, 5])
def test_one_wrong_layer_among_equal_ones_is_found(deep, layer):
    program = deep.fork()
    sums = [n for n in program.forward.graph.nodes if n.target is all_reduce]
    wrong = next(n for n in sums if info(n).path.startswith(f"h.{layer}."))
    Rewriter(program.forward, "planted").replace(wrong, wrong.args[0])
    with pytest.raises(PlacementError, match=rf"h\.{layer}\."):
        check_placed(program)


def test_numbers_that_are_equal_as_keys_are_other_arguments(deep):
    graph = deep.fork().forward.graph
    (node, *_) = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    axis, ins = decide.Axis("tp", 2, 2), (decide.REPLICATE, decide.REPLICATE)
    for alpha in (1, 1.0, True):
        node.kwargs = {"alpha": alpha}
        assert decide.Question(axis, node, ins, decide.shapes_of).decided.choice.proven
    assert len(axis.known) == 3
