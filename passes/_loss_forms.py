"""Global forms of means over the batch: a sum times a constant, or times a global count."""

from __future__ import annotations

from math import prod

import torch
from torch.fx import Graph, Node

from autoshard.diagnostics import InternalError
from autoshard.ir.graph_function import BATCH, COUNT, NORMALIZER, GraphFunction, Port
from autoshard.ir.node_info import NodeInfo, info, set_info, val
from autoshard.ir.placement import Shard
from autoshard.ir.program import Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ir.rules.call import bound_arguments
from autoshard.passes._batch_axis import BatchAxis, refuse_mixing

aten = torch.ops.aten
MEAN, SUM = 1, 2  # torch's numbers for `reduction`
TOKEN_LOSSES = (
    aten.cross_entropy_loss.default,
    aten.nll_loss_nd.default,
    aten.nll_loss.default,
)
ELEMENT_LOSSES = (
    aten.mse_loss.default,
    aten.l1_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
)
MEANS = (aten.mean.default, aten.mean.dim)


def globalize_mean(program: Program, rewriter: Rewriter, axis: BatchAxis, node: Node) -> list[Node]:
    """Rewrite ``node`` if it is a mean over the batch.

    Returns the nodes that took its place, or an empty list.
    """
    if axis.terms == 1 or not isinstance(_batch_of(axis, node), Shard):
        return []
    if node.target in MEANS and _reduces(node, _batch_of(axis, node).dim):
        return _constant_mean(rewriter, node, axis.terms)
    is_mean = bound_arguments(node).get("reduction") == MEAN if _is_loss(node) else False
    if not is_mean:
        return []
    if node.target in TOKEN_LOSSES and not val(node.args[1]).is_floating_point():
        return _counted_mean(program, rewriter, node)
    return _loss_times(rewriter, node, 1.0 / (_elements(node) * axis.terms))


def _batch_of(axis: BatchAxis, node: Node) -> object:
    known = _is_loss(node) or node.target in MEANS
    return axis.held(node.args[0]) if known else None


def _is_loss(node: Node) -> bool:
    return node.target in TOKEN_LOSSES or node.target in ELEMENT_LOSSES


def _reduces(node: Node, dim: int) -> bool:
    given = bound_arguments(node)
    rank = val(node.args[0]).dim()
    dims = given.get("dim")
    return not dims or dim in {d % rank for d in dims}


def _constant_mean(rewriter: Rewriter, node: Node, terms: int) -> list[Node]:
    """``mean(x, d)`` --> ``mul(sum(x, d), 1 / (n * terms))``."""
    (x, *dims), kwargs = node.args, node.kwargs
    op = aten.sum.dim_IntList if dims else aten.sum.default
    count = prod(val(x).shape) // max(prod(val(node).shape), 1)
    with rewriter.before(node):
        total = rewriter.call(op, x, *dims, like=node, **kwargs)
        mean = rewriter.call(aten.mul.Tensor, total, 1.0 / (count * terms), like=node)
    rewriter.replace(node, mean)
    return [total, mean]


def _loss_times(rewriter: Rewriter, node: Node, factor: object) -> list[Node]:
    """``loss(..., mean)`` --> ``mul(loss(..., sum), factor)``."""
    names = list(bound_arguments(node))
    given = bound_arguments(node) | {"reduction": SUM}
    with rewriter.before(node):
        total = rewriter.call(node.target, *(given[name] for name in names), like=node)
        loss = rewriter.call(aten.mul.Tensor, total, factor, like=node)
    rewriter.replace(node, loss)
    return [total, loss]


def _elements(node: Node) -> int:
    """Return what a mean divides by locally: rows for class probabilities, else elements."""
    shape = val(node.args[0]).shape
    return (
        prod(shape) // shape[min(1, len(shape) - 1)] if node.target in TOKEN_LOSSES else prod(shape)
    )


def _counted_mean(program: Program, rewriter: Rewriter, node: Node) -> list[Node]:
    """``cross_entropy_loss(x, t)`` --> ``mul(cross_entropy_loss(x, t, sum), normalizer)``."""
    given = bound_arguments(node)
    if given.get("weight") is not None:
        refuse_mixing(node, "class weights make the mean a quotient of sums")
    name = _count(program, rewriter, node, given["target"], given["ignore_index"])
    held = rewriter.function.node(NORMALIZER, name)
    return _loss_times(rewriter, node, held)


def _count(program: Program, rewriter: Rewriter, node: Node, target: Node, ignored: int) -> str:
    """Add the count of valid targets to the prelude and return the name of its normalizer."""
    function = rewriter.function
    if program.prelude is None:
        program.prelude = _empty(rewriter)
    prelude = program.prelude
    name = str(len(prelude.outputs))
    value = _copy(prelude, function, target, node)
    maker = Rewriter(prelude, rewriter.pass_name)
    with maker.before(prelude.output_node):
        valid = maker.call(aten.ne.Scalar, value, ignored, like=node)
        count = maker.call(aten.sum.default, valid, like=node)
    prelude.set_outputs((*prelude.results, count), (*prelude.outputs, Port(COUNT, name)))
    with rewriter.fake_mode():
        fake = torch.empty((), dtype=val(node).dtype)
    rewriter.placeholder(Port(NORMALIZER, name), fake, NodeInfo(source=info(node).source))
    return name


def _empty(rewriter: Rewriter) -> GraphFunction:
    graph = Graph()
    graph.output(())
    return GraphFunction(graph, (), ())


def _copy(prelude: GraphFunction, function: GraphFunction, wanted: Node, loss: Node) -> Node:
    """Copy what ``wanted`` is computed from into the prelude; only batch leaves may enter."""
    ports = dict(zip(function.placeholders, function.inputs, strict=True))
    known: dict[Node, Node] = {}
    for node in _ancestors(wanted):
        if node.op != "placeholder":
            with prelude.graph.inserting_before(prelude.output_node):
                made = prelude.graph.node_copy(node, known.__getitem__)
        else:
            made = _leaf(prelude, ports[node], node, loss)
        made.meta["val"] = val(node)
        set_info(made, info(node))
        known[node] = made
    return known[wanted]


def _leaf(prelude: GraphFunction, port: Port, node: Node, loss: Node) -> Node:
    if port.kind != BATCH:
        refuse_mixing(loss, f"its targets depend on '{port.name}', not on the batch alone")
    found = prelude.node(BATCH, port.name)
    if found is not None:
        return found
    first = next(iter(prelude.graph.nodes))
    anchor = prelude.placeholders[-1].next if prelude.inputs else first
    with prelude.graph.inserting_before(anchor):
        made = prelude.graph.placeholder(node.name)
    prelude.inputs = (*prelude.inputs, port)
    return made


def _ancestors(wanted: Node) -> list[Node]:
    """Return ``wanted`` and all it is computed from, in program order."""
    found, stack = {wanted}, [wanted]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                stack.append(source)
    ordered = [node for node in wanted.graph.nodes if node in found]
    if ordered[-1] is not wanted:
        raise InternalError(f"'{wanted}' comes before what it is computed from")
    return ordered
