"""Faults of stored parameters, of reductions over ranks and stages, and of schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.fx import Node

from autoshard.ir.graph_function import FLAT, GRAD
from autoshard.ir.params import Flat, Whole
from autoshard.ir.placement import Shard
from autoshard.ir.program import Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ops import collectives
from autoshard.schedule.action import Action, Kind
from autoshard.testing.faults import (
    EVERY,
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
SCATTERS = (collectives.reduce_scatter, collectives.reduce_scatter_start)
REDUCTIONS = (collectives.all_reduce, collectives.all_reduce_start, *SCATTERS)
GATHERS = (collectives.all_gather, collectives.all_gather_start)


def skip_reduce_scatter(program: Program) -> Iterator[Plant]:
    """Keep this rank's own part of a gradient bucket, not summed over the ranks."""
    for rewriter, node in calls(program, SCATTERS, EVERY):
        if node.args[3] == "dp":
            yield lambda r=rewriter, n=node: _shard_instead(r, n)


def skip_reduction(program: Program) -> Iterator[Plant]:
    """Leave the gradients of whole buckets as each data parallel rank made them."""
    for rewriter, start, result in _sums(program, "dp"):
        yield lambda r=rewriter, s=start, n=result: _bypass_sum(r, s, n)


def reduce_twice(program: Program) -> Iterator[Plant]:
    """Sum a whole bucket's gradient twice over the data parallel ranks."""
    for rewriter, _, result in _sums(program, "dp"):
        yield lambda r=rewriter, n=result: after(r, n, collectives.all_reduce, "dp")


def skip_replica_sum(program: Program) -> Iterator[Plant]:
    """Leave a shard's gradient as each group of hybrid sharding made it."""
    for rewriter, start, result in _sums(program, "dp_replicate"):
        yield lambda r=rewriter, s=start, n=result: _bypass_sum(r, s, n)


def sum_replicas_twice(program: Program) -> Iterator[Plant]:
    """Sum a shard's gradient twice over the groups of hybrid sharding."""
    for rewriter, _, result in _sums(program, "dp_replicate"):
        yield lambda r=rewriter, n=result: after(r, n, collectives.all_reduce, "dp_replicate")


def sum_all_shards(program: Program) -> Iterator[Plant]:
    """Add up different shards of a gradient, by a sum over all data parallel ranks."""
    for rewriter, start, _ in _sums(program, "dp_replicate"):
        yield lambda r=rewriter, n=start: r.set_args(n, n.args[0], "dp")


def _sums(program: Program, axis: str) -> Iterator[tuple[Rewriter, Node, Node]]:
    """Yield the all_reduces of R over an axis: where each starts, and its result."""
    sums = (collectives.all_reduce, collectives.all_reduce_start)
    for rewriter, node in calls(program, sums, ("R",)):
        if node.args[1] == axis:
            yield rewriter, node, next(iter(node.users)) if _is_started(node) else node


def _bypass_sum(rewriter: Rewriter, start: Node, result: Node) -> None:
    rewriter.replace(result, start.args[0])
    if result is not start:
        rewriter.graph.erase_node(start)


def average_gradient(program: Program) -> Iterator[Plant]:
    """Average over dp what the globally counted loss has normalised already."""
    for rewriter, node in calls(program, REDUCTIONS, ("W", "R")):
        if "dp" in node.args and not _is_started(node):
            yield lambda r=rewriter, n=node: after(r, n, aten.mul.Tensor, 0.5)
    for rewriter, node in calls(program, collectives.wait, ("W", "R")):
        if node.args[0].target in REDUCTIONS:
            yield lambda r=rewriter, n=node: after(r, n, aten.mul.Tensor, 0.5)


def lose_tied_gradient(program: Program) -> Iterator[Plant]:
    """Leave a tied gradient as each of its stages made it."""
    nodes = list(calls(program, collectives.tied_all_reduce, ("R",)))
    if nodes:
        yield lambda: _bypass_all(nodes)


def tie_one_side(program: Program) -> Iterator[Plant]:
    """Let only one of the stages that tie a weight take part in its sum."""
    for rewriter, node in calls(program, collectives.tied_all_reduce, ("R",)):
        yield bypass(rewriter, node, node.args[0])


def lose_tied_use(program: Program) -> Iterator[Plant]:
    """Forget one of two uses of a tied weight within a stage."""
    tied = [spec.fqn for spec in program.params if spec.aliases]
    for function in functions(program, ("I", "W")):
        grads = function.named_results(GRAD)
        for name in tied:
            node = grads.get(name)
            if node is not None and node.target is aten.add.Tensor:
                values = [node.args[0] if v is node else v for v in function.results]
                yield lambda f=function, v=values: f.set_outputs(v, f.outputs)


def read_another_bucket(program: Program) -> Iterator[Plant]:
    """Gather another bucket of the same length: a stale or misnamed one."""
    for function in functions(program):
        for a, b in alike(list(function.named(FLAT).values())):
            yield lambda a=a, b=b: swap_readers(a, b)


def read_another_place(program: Program) -> Iterator[Plant]:
    """Read a parameter at the place of another one in its gathered bucket."""
    for function in functions(program):
        views = [n for n in function.graph.nodes if n.target is collectives.view_at]
        for a, b in alike(views):
            if a.args[0] is b.args[0]:
                yield lambda a=a, b=b: _swap_offsets(a, b)


def skip_wait(program: Program) -> Iterator[Plant]:
    """Read the result of a collective that has only been started."""
    for rewriter, node in calls(program, collectives.wait, EVERY):
        yield bypass(rewriter, node, node.args[0])


def release_early(program: Program) -> Iterator[Plant]:
    """Free a gathered bucket before its last reader."""
    for _, node in calls(program, collectives.release):
        readers = [u for u in node.args[0].users if u is not node]
        if len(readers) > 1:
            yield lambda n=node, r=readers: r[0].append(n)


def overlap_storage(program: Program) -> Iterator[Plant]:
    """Store two parameters at one place of a bucket."""
    for spec in program.params:
        held = spec.storage
        if isinstance(held, (Flat, Whole)) and held.bucket and held.offset:
            yield lambda s=spec, h=held: program.params.update(s.fqn, storage=replace(h, offset=0))


def forget_parameter(program: Program) -> Iterator[Plant]:
    """Leave a parameter out of its bucket, so that nobody stores or updates it."""
    for index, bucket in enumerate(program.buckets):
        if len(bucket.fqns) > 1:
            yield lambda i=index, b=bucket: set_bucket(program, i, fqns=b.fqns[:-1])


def place_wrong_dim(program: Program) -> Iterator[Plant]:
    """Cut a parameter along its other dimension."""
    for spec in program.params:
        held = spec.placements.get("tp")
        if isinstance(held, Shard) and len(spec.shape) == 2 and not held.blocks:
            turned = {**spec.placements, "tp": Shard(1 - held.dim)}
            yield lambda s=spec, p=turned: program.params.update(s.fqn, placements=p)


def retie_members(program: Program) -> Iterator[Plant]:
    """Sum a tied gradient over one stage alone."""
    for rewriter, node in calls(program, collectives.tied_all_reduce, ("R",)):
        yield lambda r=rewriter, n=node: r.set_args(n, *n.args[:2], list(n.args[2])[:1])


def swap_sends(program: Program) -> Iterator[Plant]:
    """Send two micro-batches in the wrong order."""
    for row, places in _rows(program, Kind.SEND_F):
        if len(places) > 1:
            yield lambda row=row, p=places: _swap_actions(program, row, p[0], p[1])


def drop_action(program: Program) -> Iterator[Plant]:
    """Leave out one action of the schedule of each kind."""
    for kind in (Kind.F, Kind.B, Kind.W, Kind.SEND_B, Kind.RECV_F, Kind.UNSHARD, Kind.REDUCE_GRAD):
        for row, places in _rows(program, kind):
            yield lambda row=row, p=places[-1]: _drop(program, row, p)


def backward_first(program: Program) -> Iterator[Plant]:
    """Run a backward before its forward."""
    for row, actions in enumerate(program.schedule.ranks):
        first = next((i for i, a in enumerate(actions) if a.kind is Kind.F), None)
        back = next((i for i, a in enumerate(actions) if a.kind in (Kind.B, Kind.I)), None)
        if first is not None and back is not None:
            yield lambda row=row, a=first, b=back: _swap_actions(program, row, a, b)


def repeat_microbatch(program: Program) -> Iterator[Plant]:
    """Run one micro-batch twice and another one never."""
    for row, places in _rows(program, Kind.F):
        if len(places) > 1:
            yield lambda row=row, p=places: _repeat(program, row, p[0], p[1])


FAULTS = (
    Fault("skip-reduce-scatter", "a bucket's gradient is not summed", skip_reduce_scatter),
    Fault("skip-reduction", "an all_reduce over dp is missing", skip_reduction),
    Fault("reduce-twice", "gradients are summed twice over dp", reduce_twice),
    Fault("skip-replica-sum", "a sum over dp_replicate is missing", skip_replica_sum),
    Fault("sum-replicas-twice", "shards are summed twice over dp_replicate", sum_replicas_twice),
    Fault("sum-all-shards", "different shards are added up", sum_all_shards),
    Fault("average-gradient", "gradients are averaged over dp", average_gradient),
    Fault("lose-tied-gradient", "stages keep their own tied gradient", lose_tied_gradient),
    Fault("tie-one-side", "one stage leaves out the tied sum", tie_one_side),
    Fault("lose-tied-use", "one use of a tied weight does not count", lose_tied_use),
    Fault("retie-members", "a tied gradient is summed over one stage", retie_members),
    Fault("read-another-bucket", "a stale gather is read", read_another_bucket),
    Fault("read-another-place", "a parameter is read at another's place", read_another_place),
    Fault("skip-wait", "a started collective is read", skip_wait),
    Fault("release-early", "a gathered bucket is freed while it is read", release_early),
    Fault("overlap-storage", "two parameters share a place", overlap_storage),
    Fault("forget-parameter", "a parameter has no owner", forget_parameter),
    Fault("place-wrong-dim", "a parameter is cut along the other dim", place_wrong_dim),
    Fault("swap-sends", "two sends change places", swap_sends),
    Fault("drop-action", "an action of the schedule is missing", drop_action),
    Fault("backward-first", "a backward runs before its forward", backward_first),
    Fault("repeat-microbatch", "a micro-batch runs twice", repeat_microbatch),
)


def _is_started(node: Node) -> bool:
    return node.target in collectives.STARTS


def _shard_instead(rewriter: Rewriter, node: Node) -> None:
    with rewriter.before(node):
        part = rewriter.call(collectives.shard, *node.args, like=node)
    users = list(node.users)
    started = [user for user in users if user.target is collectives.wait]
    for old in started or [node]:
        old.replace_all_uses_with(part)
        rewriter.graph.erase_node(old)
    if started:
        rewriter.graph.erase_node(node)


def _swap_offsets(a: Node, b: Node) -> None:
    first, second = a.args[1], b.args[1]
    a.args = (a.args[0], second, a.args[2])
    b.args = (b.args[0], first, b.args[2])


def _rows(program: Program, kind: Kind) -> Iterator[tuple[int, list[int]]]:
    for row, actions in enumerate(program.schedule.ranks):
        places = [i for i, action in enumerate(actions) if action.kind is kind]
        if places:
            yield row, places


def _bypass_all(nodes: list[tuple[Rewriter, Node]]) -> None:
    for rewriter, node in nodes:
        rewriter.replace(node, node.args[0])


def _edit(program: Program, row: int, actions: list[Action]) -> None:
    assert program.schedule is not None
    rows = list(program.schedule.ranks)
    rows[row] = tuple(actions)
    program.schedule = replace(program.schedule, ranks=tuple(rows))


def _swap_actions(program: Program, row: int, a: int, b: int) -> None:
    actions = list(program.schedule.ranks[row])
    actions[a], actions[b] = actions[b], actions[a]
    _edit(program, row, actions)


def _drop(program: Program, row: int, place: int) -> None:
    actions = list(program.schedule.ranks[row])
    del actions[place]
    _edit(program, row, actions)


def _repeat(program: Program, row: int, kept: int, lost: int) -> None:
    actions = list(program.schedule.ranks[row])
    actions[lost] = actions[kept]
    _edit(program, row, actions)
