"""Faults of what a program is told beside its arithmetic: parts, sizes, number types and owners."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch.fx import Node

from autoshard.ir.graph_function import BATCH, BOUNDARY, PARAM
from autoshard.ir.masks import mask_of
from autoshard.ir.node_info import val
from autoshard.ir.placement import Shard
from autoshard.ir.program import Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ir.rules.call import bound_arguments
from autoshard.ops import collectives, vocab
from autoshard.testing.faults import (
    EVERY,
    PASS_NAME,
    Fault,
    Plant,
    after,
    alike,
    bypass,
    calls,
    functions,
    set_bucket,
    swap_readers,
)

aten = torch.ops.aten
SPLIT_LOSSES = (vocab.vocab_cross_entropy, vocab.vocab_cross_entropy_backward)
LOSSES = (*SPLIT_LOSSES, aten.nll_loss_forward.default, aten.nll_loss_backward.default)
REDUCED = (collectives.all_reduce, collectives.reduce_scatter)
STARTED = (collectives.all_reduce_start, collectives.reduce_scatter_start)
RESHAPED = (collectives.all_gather, collectives.reduce_scatter, collectives.shard)


def shift_labels(program: Program) -> Iterator[Plant]:
    """Let the loss read each token's own label instead of the next one's, or another sample's."""
    for function in functions(program, ("F",)):
        for name, node in function.named(BATCH).items():
            if "label" in name:
                rewriter = Rewriter(function, PASS_NAME)
                yield lambda r=rewriter, n=node: after(r, n, aten.roll.default, [1], [1])


def ignore_another(program: Program) -> Iterator[Plant]:
    """Let a loss, or its backward, ignore another label than the model does."""
    for rewriter, node in calls(program, LOSSES):
        args = tuple({**bound_arguments(node), "ignore_index": -1}.values())
        yield lambda r=rewriter, n=node, a=args: r.set_args(n, *a)


def share_mask(program: Program) -> Iterator[Plant]:
    """Draw one mask at two sites."""
    for function in functions(program):
        masked = [n for n in function.graph.nodes if mask_of(n) is not None]
        for a, b in pairwise(masked):
            sites = mask_of(a).site, mask_of(b).site
            if sites[0] != sites[1]:
                rewriter = Rewriter(function, PASS_NAME)
                yield lambda r=rewriter, b=b, s=sites: _redraw(r, b, s[1], s[0])


def draw_another_part(program: Program) -> Iterator[Plant]:
    """Draw the mask of a value that is cut in two blocks, where it is cut in one."""
    for function in functions(program):
        for node in function.graph.nodes:
            mask = mask_of(node)
            if mask is not None and mask.axes and list(mask.counts) == [0]:
                extent = val(mask.x).shape[mask.dims[0]] * mask.sizes[0]
                told = (2,), (extent // 2, extent // 2)
                rewriter = Rewriter(function, PASS_NAME)
                yield lambda r=rewriter, n=node, t=told: _tell_blocks(r, n, *t)


def miscount_ranks(program: Program) -> Iterator[Plant]:
    """Tell an operator over a split vocabulary of twice as many ranks."""
    ops = (*SPLIT_LOSSES, vocab.vocab_embedding, vocab.vocab_embedding_backward)
    for rewriter, node in calls(program, ops):
        place = node.args.index("tp") + 1
        args = (*node.args[:place], 2 * node.args[place], *node.args[place + 1 :])
        yield lambda r=rewriter, n=node, a=args: r.set_args(n, *a)


def cut_all_alike(program: Program) -> Iterator[Plant]:
    """Let every rank keep the first part of a value that is cut."""
    for rewriter, node in calls(program, collectives.shard):
        extent = val(node).shape[node.args[1]]
        yield lambda r=rewriter, n=node, e=extent: _slice_instead(r, n, e)


def gather_own_part(program: Program) -> Iterator[Plant]:
    """Put a rank's own part in the place of all others instead of gathering those."""
    for rewriter, node in calls(program, collectives.all_gather):
        yield lambda r=rewriter, n=node: _repeat_instead(r, n)


def join_other_blocks(program: Program) -> Iterator[Plant]:
    """Cut or join a value in two blocks that lies in one."""
    for rewriter, node in calls(program, RESHAPED):
        x, dim, blocks, axis, *rest = node.args
        extent = max(val(x).shape[dim], val(node).shape[dim])
        if axis == "tp" and not blocks and extent % (2 * rest[0]) == 0:
            args = (x, dim, [extent // 2, extent // 2], axis, *rest)
            yield lambda r=rewriter, n=node, a=args: r.set_args(n, *a)


def forget_blocks(program: Program) -> Iterator[Plant]:
    """Cut a packed parameter as if it were one."""
    for spec in program.params:
        held = spec.placements.get("tp")
        if isinstance(held, Shard) and held.blocks:
            placed = {**spec.placements, "tp": Shard(held.dim)}
            yield lambda s=spec, p=placed: program.params.update(s.fqn, placements=p)


def lose_head_sum(program: Program) -> Iterator[Plant]:
    """Leave the gradient of a head that several ranks keep as each of them made it."""
    for rewriter, node in calls(program, collectives.all_reduce_within):
        yield bypass(rewriter, node, node.args[0])


def sum_heads_twice(program: Program) -> Iterator[Plant]:
    """Sum the gradient of a head that several ranks keep twice over them."""
    for rewriter, node in calls(program, collectives.all_reduce_within):
        yield lambda r=rewriter, n=node: after(r, n, n.target, *n.args[1:])


def sum_what_is_no_copy(program: Program) -> Iterator[Plant]:
    """Sum a value over neighbouring ranks that do not hold the same."""
    for rewriter, node in calls(program, aten.mm.default, ("I", "W")):
        if program.mesh.size("tp") > 1:
            op = collectives.all_reduce_within
            yield lambda r=rewriter, n=node, o=op: after(r, n, o, 2, "tp")


def transpose_boundary(program: Program) -> Iterator[Plant]:
    """Send a boundary value turned, in its old shape."""
    for function in functions(program, ("F",)):
        for node in function.named_results(BOUNDARY).values():
            if node is not None and val(node).dim() == 3:
                rewriter = Rewriter(function, PASS_NAME)
                yield lambda r=rewriter, n=node: _turn_output(r, n)


def swap_parameters(program: Program) -> Iterator[Plant]:
    """Let two parameters of one shape be read in each other's place."""
    for function in functions(program):
        for pair in alike(list(function.named(PARAM).values())):
            yield lambda p=pair: swap_readers(*p)


def pack_in_another_order(program: Program) -> Iterator[Plant]:
    """Pack two gradients of one shape in each other's place of a bucket."""
    for rewriter, node in calls(program, collectives.pack, EVERY):
        for a, b in alike(list(node.all_input_nodes)):
            swapped = {a: b, b: a}
            values = [swapped.get(value, value) for value in node.args[0]]
            args = (values, *node.args[1:])
            yield lambda r=rewriter, n=node, v=args: r.set_args(n, *v)


def reduce_narrow(program: Program) -> Iterator[Plant]:
    """Reduce gradients in a narrower number type than the plan says."""
    for rewriter, node in calls(program, (*REDUCED, *STARTED), ("I", "W", "R")):
        if "tp" not in node.args:
            yield lambda r=rewriter, n=node: _narrow(r, n)


def freeze_parameter(program: Program) -> Iterator[Plant]:
    """Stop to train a parameter."""
    for spec in program.params.trainable():
        yield lambda s=spec: program.params.update(s.fqn, requires_grad=False)


def untie_bucket(program: Program) -> Iterator[Plant]:
    """Let one stage alone keep a weight that several stages tie."""
    for index, bucket in enumerate(program.buckets):
        if bucket.tied_stages:
            yield lambda i=index: set_bucket(program, i, tied_stages=())


def move_bucket(program: Program) -> Iterator[Plant]:
    """Let a stage store the parameters of another one."""
    for index, bucket in enumerate(program.buckets):
        if not bucket.tied_stages and len(program.stages) > 1:
            other = (bucket.stage + 1) % len(program.stages)
            yield lambda i=index, s=other: set_bucket(program, i, stage=s)


def own_twice(program: Program) -> Iterator[Plant]:
    """Store a parameter in a second bucket, too."""
    for index, (bucket, other) in enumerate(pairwise(program.buckets)):
        fqns = (*bucket.fqns, other.fqns[0])
        yield lambda i=index, f=fqns: set_bucket(program, i, fqns=f)


def keep_whole(program: Program) -> Iterator[Plant]:
    """Store a bucket whole that the plan cuts."""
    for index, bucket in enumerate(program.buckets):
        if bucket.axis is not None:
            yield lambda i=index: set_bucket(program, i, axis=None)


def change_constant(program: Program) -> Iterator[Plant]:
    """Read another constant than the captured one."""
    for name, value in program.constants.items():
        other = ~value if value.dtype is torch.bool else value + 1
        yield lambda n=name, v=other: program.constants.update({n: v})


FAULTS = (
    Fault("shift-labels", "labels are those of other tokens", shift_labels),
    Fault("ignore-another", "a loss ignores another label", ignore_another),
    Fault("share-mask", "two dropouts draw one mask", share_mask),
    Fault("draw-another-part", "a rank draws another part of a mask", draw_another_part),
    Fault("miscount-ranks", "an operator counts other ranks", miscount_ranks),
    Fault("cut-all-alike", "every rank keeps the first part", cut_all_alike),
    Fault("gather-own-part", "a rank's part stands for all others", gather_own_part),
    Fault("join-other-blocks", "a value is joined in other blocks", join_other_blocks),
    Fault("forget-blocks", "a packed parameter is cut as one", forget_blocks),
    Fault("lose-head-sum", "a kept head's gradient is not summed", lose_head_sum),
    Fault("sum-heads-twice", "a kept head's gradient is summed twice", sum_heads_twice),
    Fault("sum-what-is-no-copy", "neighbours sum different values", sum_what_is_no_copy),
    Fault("transpose-boundary", "a boundary value is sent turned", transpose_boundary),
    Fault("swap-parameters", "two parameters change places", swap_parameters),
    Fault("pack-in-another-order", "gradients change places", pack_in_another_order),
    Fault("reduce-narrow", "gradients are reduced in a narrow type", reduce_narrow),
    Fault("freeze-parameter", "a parameter is no longer trained", freeze_parameter),
    Fault("untie-bucket", "one stage alone keeps a tied weight", untie_bucket),
    Fault("move-bucket", "a stage stores another one's bucket", move_bucket),
    Fault("own-twice", "a parameter lies in two buckets", own_twice),
    Fault("keep-whole", "a bucket is stored whole", keep_whole),
    Fault("change-constant", "a constant is another one", change_constant),
)


def _redraw(rewriter: Rewriter, node: Node, site: int, other: int) -> None:
    place = next(i for i, a in enumerate(node.args) if a == site and type(a) is int and i > 2)
    rewriter.set_args(node, *node.args[:place], other, *node.args[place + 1 :])


def _tell_blocks(
    rewriter: Rewriter, node: Node, counts: tuple[int, ...], blocks: tuple[int, ...]
) -> None:
    *head, _, _, axes, sizes = node.args
    rewriter.set_args(node, *head, counts, blocks, axes, sizes)


def _slice_instead(rewriter: Rewriter, node: Node, extent: int) -> None:
    with rewriter.before(node):
        part = rewriter.call(aten.slice.Tensor, *node.args[:2], 0, extent, like=node)
    rewriter.replace(node, part)


def _repeat_instead(rewriter: Rewriter, node: Node) -> None:
    x, dim, _, _, size, *_ = node.args
    with rewriter.before(node):
        whole = rewriter.call(aten.cat.default, [x] * size, dim, like=node)
    rewriter.replace(node, whole)


def _turn_output(rewriter: Rewriter, node: Node) -> None:
    function, shape = rewriter.function, list(val(node).shape)
    with rewriter.after(node):
        turned = rewriter.call(aten.transpose.int, node, 0, 1, like=node)
        shaped = rewriter.call(aten.reshape.default, turned, shape, like=node)
    values = [shaped if value is node else value for value in function.results]
    function.set_outputs(values, function.outputs)


def _narrow(rewriter: Rewriter, node: Node) -> None:
    """Reduce in bfloat16 and go on in the type from before."""
    dtype, end = val(node).dtype, node
    with rewriter.before(node):
        low = rewriter.call(aten._to_copy.default, node.args[0], like=node, dtype=torch.bfloat16)
    rewriter.set_args(node, low, *node.args[1:])
    if node.target in STARTED:
        (end,) = node.users
        rewriter.refake(end)
    users = list(end.users)
    with rewriter.after(end):
        wide = rewriter.call(aten._to_copy.default, end, like=end, dtype=dtype)
    for user in users:
        user.replace_input_with(end, wide)
