"""Views, last uses, parts of graphs and what is cleaned from traced graphs."""

import operator

import torch
from torch import nn

from autoshard.ir.aliases import cheap_base, is_cheap, is_view, lifetime_end, view_base
from autoshard.ir.extract import ancestors, extract
from autoshard.ir.graph_function import BATCH, OUTPUT, PARAM, GraphFunction, Port
from autoshard.ir.lower import lower
from autoshard.ir.node_info import NodeInfo, set_info
from autoshard.ir.tidy import erase_dead

aten = torch.ops.aten


def traced(module: nn.Module, *args: torch.Tensor) -> GraphFunction:
    """Return a module as a graph: parameters, then batch inputs."""
    exported = torch.export.export(module, args, strict=False).run_decompositions({})
    names = [spec.target for spec in exported.graph_signature.input_specs]
    ports = [Port(PARAM, n) if n else Port(BATCH, str(i)) for i, n in enumerate(names)]
    for node in exported.graph.nodes:
        node.meta = {"val": node.meta.get("val")}
        set_info(node, NodeInfo(path="root"))
    outputs = tuple(Port(OUTPUT, str(i)) for i in range(len(exported.graph.output_node().args[0])))
    return GraphFunction(exported.graph, tuple(ports), outputs)


class Views(nn.Module):
    """Splits, a transpose, a sum that is used twice and a value that nobody reads."""

    def forward(self, x):
        """Return sums of parts of x."""
        doubled = x * 2
        a, b = doubled.split(2, 1)
        return (a.t() @ b) + (doubled.sum() * 3)


def nodes(function: GraphFunction) -> dict[str, torch.fx.Node]:
    """Return operations by name."""
    return {n.name: n for n in function.graph.nodes}


def test_splits_items_and_transposes_are_views_of_one_value() -> None:
    by_name = nodes(lower(traced(Views(), torch.randn(3, 4))))
    picks = [n for n in by_name.values() if n.target is operator.getitem]
    assert picks and all(is_view(p) for p in picks)
    assert {view_base(p).target for p in picks} == {aten.mul.Tensor}
    assert view_base(by_name["t"]) is by_name["mul"]
    assert not is_view(by_name["mm"])


def test_items_of_several_results_are_no_views() -> None:
    function = lower(traced(nn.LayerNorm(4), torch.randn(3, 4)))
    (pick,) = (n for n in function.graph.nodes if n.target is operator.getitem)
    assert not is_view(pick) and cheap_base(pick) is pick


def test_casts_of_inputs_and_to_wider_types_are_cheap_but_not_to_narrower_ones() -> None:
    class Casts(nn.Module):
        def forward(self, x):
            return torch.stack([x.half().float(), (x * 2).half().float()]), (x * 3).double()

    of_input, back, narrow, _, wide = (
        n
        for n in lower(traced(Casts(), torch.randn(3))).graph.nodes
        if n.target is aten._to_copy.default
    )
    assert is_cheap(of_input) and is_cheap(back) and is_cheap(wide)
    assert not is_cheap(narrow)


def test_a_value_lives_as_long_as_its_views_are_read() -> None:
    function = lower(traced(Views(), torch.randn(3, 4)))
    order = {node: index for index, node in enumerate(function.graph.nodes)}
    by_name = nodes(function)
    assert lifetime_end(by_name["mul"], order).target in (aten.mm.default, aten.sum.default)


def test_extract_takes_given_values_as_inputs_and_drops_what_is_not_read() -> None:
    function = lower(traced(Views(), torch.randn(3, 4)))
    by_name = nodes(function)
    body = ancestors(function.results, {by_name["mul"]})
    body -= set(function.placeholders)
    ordered = [n for n in function.graph.nodes if n in body]
    unread = (Port(BATCH, "0"), function.placeholders[0])
    part = extract([unread, (Port(BATCH, "m"), by_name["mul"])], ordered, [])
    part_y = extract(
        [(Port(BATCH, "m"), by_name["mul"])], ordered, [(Port(OUTPUT, "y"), function.results[0])]
    )
    assert part.inputs == (Port(BATCH, "m"),)
    x = torch.randn(3, 4)
    assert torch.equal(part_y.module()(x * 2)[0], Views()(x))


def test_dead_operations_go_with_the_inputs_only_they_read() -> None:
    function = lower(traced(Views(), torch.randn(3, 4)))
    function.set_outputs((), ())
    erase_dead(function)
    assert [n.op for n in function.graph.nodes] == ["output"]
    assert function.inputs == ()
