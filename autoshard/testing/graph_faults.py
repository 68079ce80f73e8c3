"""Faults of values and communication inside the graphs of stages."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from autoshard.ir.graph_function import (
    BOUNDARY,
    GRAD,
    LOSS,
    NORMALIZER,
    SAVED,
    TANGENT,
    GraphFunction,
)
from autoshard.ir.node_info import info
from autoshard.ir.program import Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ops import collectives, vocab
from autoshard.ops.dropout import DropoutArgs, dropout
from autoshard.testing.faults import (
    PASS_NAME,
    Fault,
    Plant,
    after,
    alike,
    bypass,
    calls,
    functions,
    swap_readers,
)

aten = torch.ops.aten
SUMS = (collectives.all_reduce, collectives.all_reduce_start)
FUSED_NORMS = (
    torch.ops.autoshard.add_layer_norm.default,
    torch.ops.autoshard.add_rms_norm.default,
)
FUSED_NORMS_BACKWARD = (
    torch.ops.autoshard.add_layer_norm_backward.default,
    torch.ops.autoshard.add_rms_norm_backward.default,
)
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


def drop_collective(program: Program) -> Iterator[Plant]:
    """Let the users of an all_reduce over tp read its partial input."""
    for rewriter, node in calls(program, SUMS):
        yield lambda r=rewriter, n=node: _bypass_sum(r, n)


def double_collective(program: Program) -> Iterator[Plant]:
    """Reduce once more what an all_reduce over tp has reduced."""
    for rewriter, node in calls(program, SUMS):
        yield lambda r=rewriter, n=node: after(r, _result(n), collectives.all_reduce, n.args[1])


def wrong_axis(program: Program) -> Iterator[Plant]:
    """Reduce over dp what is partial over tp."""
    for rewriter, node in calls(program, SUMS):
        yield lambda r=rewriter, n=node: r.set_args(n, n.args[0], "dp")


def scale_by_ranks(program: Program) -> Iterator[Plant]:
    """Average over the ranks what an all_reduce must sum: a factor 1 / tp."""
    for rewriter, node in calls(program, SUMS):
        factor = 1.0 / program.mesh.size("tp")
        yield lambda r=rewriter, n=node, f=factor: after(r, _result(n), aten.mul.Tensor, f)


def scale_by_microbatches(program: Program) -> Iterator[Plant]:
    """Divide the loss by the number of micro-batches once more."""
    for function in functions(program, ("F",)):
        node = function.result(LOSS)
        if node is not None and program.num_microbatches > 1:
            factor = 1.0 / program.num_microbatches
            yield lambda f=function, n=node, by=factor: _scale_output(f, n, by)


def sum_bias_twice(program: Program) -> Iterator[Plant]:
    """Add a row-parallel bias before its all_reduce, so that every rank's copy is summed."""
    for rewriter, node in calls(program, collectives.all_reduce, ("F",)):
        for add in (u for u in node.users if u.target is aten.add.Tensor):
            bias = next((a for a in add.args if a is not node), None)
            if isinstance(bias, Node) and bias.meta["val"].dim() == 1:
                yield lambda r=rewriter, n=node, a=add, b=bias: _add_early(r, n, a, b)


def reduce_maximum(program: Program) -> Iterator[Plant]:
    """Gather and take one rank's part where a sum over ranks is due."""
    for rewriter, node in calls(program, collectives.all_reduce, ("F",)):
        size = program.mesh.size("tp")
        extent = node.meta["val"].shape[-1]
        if extent % size == 0:
            yield lambda r=rewriter, n=node, s=size: _gather_instead(r, n, s)


def swap_boundary(program: Program) -> Iterator[Plant]:
    """Swap two values of one shape that cross a stage boundary, or their gradients."""
    for phase, kind in (("F", BOUNDARY), ("I", TANGENT)):
        for function in functions(program, (phase,)):
            nodes = [n for n in function.named_results(kind).values() if n is not None]
            for pair in alike(nodes):
                yield lambda f=function, p=pair: _swap_outputs(f, *p)


def swap_saved(program: Program) -> Iterator[Plant]:
    """Let backward read another kept value of the same shape."""
    for function in functions(program, ("I", "W")):
        for a, b in alike(list(function.named(SAVED).values())):
            yield lambda a=a, b=b: swap_readers(a, b)


def swap_gradients(program: Program) -> Iterator[Plant]:
    """Give out the gradients of two parameters of one shape under each other's name."""
    for function in functions(program, ("I", "W")):
        nodes = [n for n in function.named_results(GRAD).values() if n is not None]
        for pair in alike(nodes):
            yield lambda f=function, p=pair: _swap_outputs(f, *p)


def scale_gradient(program: Program) -> Iterator[Plant]:
    """Halve one parameter's gradient."""
    for function in functions(program, ("I", "W")):
        for node in function.named_results(GRAD).values():
            if node is not None and node.op == "call_function":
                yield lambda f=function, n=node: _scale_output(f, n, 0.5)


def lose_branch(program: Program) -> Iterator[Plant]:
    """Forget one of two gradients that meet in backward: of a residual, or of a tied weight."""
    for rewriter, node in calls(program, aten.add.Tensor, ("I", "W")):
        if all(isinstance(a, Node) for a in node.args[:2]) and info(node).phase == "B":
            yield bypass(rewriter, node, node.args[0])
            yield bypass(rewriter, node, node.args[1])


def drop_layer(program: Program) -> Iterator[Plant]:
    """Leave out what a sub-layer adds to the residual stream in forward."""
    for rewriter, node in calls(program, aten.add.Tensor, ("F",)):
        both = node.args[:2]
        if all(isinstance(a, Node) and _same_shape(a, node) for a in both):
            yield bypass(rewriter, node, both[0])


def drop_fused_branch(program: Program) -> Iterator[Plant]:
    """Let a fused add and norm add the residual to itself."""
    for rewriter, node in calls(program, FUSED_NORMS, ("F",)):
        args = (node.args[0], node.args[0], *node.args[2:])
        yield lambda r=rewriter, n=node, a=args: r.set_args(n, *a)


def lose_fused_gradient(program: Program) -> Iterator[Plant]:
    """Forget the residual's own gradient in the backward of a fused add and norm."""
    for rewriter, node in calls(program, FUSED_NORMS_BACKWARD, ("I", "W")):
        if node.args[1] is not None:
            args = (node.args[0], None, *node.args[2:])
            yield lambda r=rewriter, n=node, a=args: r.set_args(n, *a)


def see_the_future(program: Program) -> Iterator[Plant]:
    """Lose the causal mask of one attention in forward."""
    for rewriter, node in calls(program, ATTENTION, ("F",)):
        if len(node.args) > 4 and node.args[4]:
            args = (*node.args[:4], False)
            yield lambda r=rewriter, n=node, a=args: r.set_args(n, *a)


def swap_query_and_key(program: Program) -> Iterator[Plant]:
    """Let an attention read its key as query and its query as key."""
    for rewriter, node in calls(program, ATTENTION, ("F",)):
        query, key, *rest = node.args
        if _same_shape(query, key):
            args = (key, query, *rest)
            yield lambda r=rewriter, n=node, a=args: r.set_args(n, *a)


def localize_normalizer(program: Program) -> Iterator[Plant]:
    """Divide by the tokens of one micro-batch of one rank instead of the global batch's."""
    terms = program.num_microbatches * program.mesh.size("dp")
    for function in functions(program, ("F", "I", "W")):
        for node in function.named(NORMALIZER).values():
            if terms > 1:
                rewriter = Rewriter(function, PASS_NAME)
                yield lambda r=rewriter, n=node: after(r, n, aten.mul.Tensor, float(terms))


def count_ignored(program: Program) -> Iterator[Plant]:
    """Count the tokens that the loss ignores, too."""
    for function in (program.prelude,):
        for node in (
            function.graph.find_nodes(op="call_function", target=aten.ne.Scalar) if function else ()
        ):
            rewriter = Rewriter(function, PASS_NAME)
            yield lambda r=rewriter, n=node: r.set_args(n, n.args[0], -101)


def pad_the_softmax(program: Program) -> Iterator[Plant]:
    """Let the padding of a split vocabulary take part in the softmax."""
    for op, at in ((vocab.vocab_cross_entropy, 4), (vocab.vocab_cross_entropy_backward, 6)):
        for rewriter, node in calls(program, op):
            logits = node.args[0 if at == 4 else 1]
            padded = logits.meta["val"].shape[-1] * node.args[at - 1]
            if padded != node.args[at]:
                args = (*node.args[:at], padded, *node.args[at + 1 :])
                yield lambda r=rewriter, n=node, a=args: r.set_args(n, *a)


def draw_twice(program: Program) -> Iterator[Plant]:
    """Draw another mask in backward than in forward."""
    for rewriter, node in calls(program, dropout, ("I", "W")):
        args = DropoutArgs(*node.args)
        moved = args._replace(site=args.site + 1000)
        yield lambda r=rewriter, n=node, a=moved: r.set_args(n, *a)


def draw_alike(program: Program) -> Iterator[Plant]:
    """Let every tensor parallel rank draw the mask of the first one's part."""
    for rewriter, node in calls(program, dropout, ("F",)):
        args = DropoutArgs(*node.args)
        if args.axes:
            alone = args._replace(dims=(), counts=(), blocks=(), axes=(), sizes=())
            yield lambda r=rewriter, n=node, a=alone: r.set_args(n, *a)


def transpose_wrong(program: Program) -> Iterator[Plant]:
    """Swap the factors of a square product in backward."""
    for rewriter, node in calls(program, aten.mm.default, ("I", "W")):
        a, b = node.args
        shapes = {tuple(n.meta["val"].shape) for n in (a, b)}
        if len(shapes) == 1 and len(set(next(iter(shapes)))) == 1:
            yield lambda r=rewriter, n=node, pair=(b, a): r.set_args(n, *pair)


FAULTS = (
    Fault("drop-collective", "an all_reduce is missing", drop_collective),
    Fault("double-collective", "an all_reduce is done twice", double_collective),
    Fault("wrong-axis", "a reduction runs over another mesh axis", wrong_axis),
    Fault("scale-by-ranks", "what must be summed over tp is averaged", scale_by_ranks),
    Fault("scale-by-microbatches", "the loss is divided by m twice", scale_by_microbatches),
    Fault("sum-bias-twice", "a row-parallel bias is summed over tp", sum_bias_twice),
    Fault("reduce-maximum", "one rank's part stands for the sum", reduce_maximum),
    Fault("swap-boundary", "two values of a boundary change places", swap_boundary),
    Fault("swap-saved", "backward reads another kept value", swap_saved),
    Fault("swap-gradients", "two gradients change names", swap_gradients),
    Fault("scale-gradient", "one gradient is halved", scale_gradient),
    Fault("lose-branch", "one of two gradients that meet is lost", lose_branch),
    Fault("drop-layer", "a sub-layer does not reach the residual", drop_layer),
    Fault("drop-fused-branch", "a fused norm adds the wrong branch", drop_fused_branch),
    Fault("lose-fused-gradient", "a fused norm loses the residual's gradient", lose_fused_gradient),
    Fault("see-the-future", "an attention loses its causal mask", see_the_future),
    Fault("swap-query-and-key", "query and key change places", swap_query_and_key),
    Fault("localize-normalizer", "the loss counts local tokens only", localize_normalizer),
    Fault("count-ignored", "ignored tokens are counted", count_ignored),
    Fault("pad-the-softmax", "padding takes part in the softmax", pad_the_softmax),
    Fault("draw-twice", "backward draws another dropout mask", draw_twice),
    Fault("draw-alike", "all ranks draw one mask for their parts", draw_alike),
    Fault("transpose-wrong", "a product's factors change places", transpose_wrong),
)


def _result(node: Node) -> Node:
    """Return the node that gives a sum: the wait of one that is only started."""
    return next(iter(node.users)) if node.target in collectives.STARTS else node


def _bypass_sum(rewriter: Rewriter, node: Node) -> None:
    result = _result(node)
    rewriter.replace(result, node.args[0])
    if result is not node:
        rewriter.graph.erase_node(node)


def _scale_output(function: GraphFunction, node: Node, factor: float) -> None:
    rewriter = Rewriter(function, PASS_NAME)
    with rewriter.after(node):
        scaled = rewriter.call(aten.mul.Tensor, node, factor, like=node)
    values = [scaled if value is node else value for value in function.results]
    function.set_outputs(values, function.outputs)


def _swap_outputs(function: GraphFunction, a: Node, b: Node) -> None:
    swapped = {a: b, b: a}
    values = [swapped.get(value, value) for value in function.results]
    function.set_outputs(values, function.outputs)


def _add_early(rewriter: Rewriter, node: Node, add: Node, bias: Node) -> None:
    with rewriter.before(node):
        early = rewriter.call(aten.add.Tensor, node.args[0], bias, like=node)
    rewriter.set_args(node, early, node.args[1])
    rewriter.replace(add, node)


def _gather_instead(rewriter: Rewriter, node: Node, size: int) -> None:
    last = node.meta["val"].dim() - 1
    with rewriter.before(node):
        part = rewriter.call(collectives.shard, node.args[0], last, [], "tp", size, like=node)
        whole = rewriter.call(collectives.all_gather, part, last, [], "tp", size, like=node)
    rewriter.replace(node, whole)


def _same_shape(a: Node, b: Node) -> bool:
    return a.meta["val"].shape == b.meta["val"].shape
