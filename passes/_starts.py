"""Replace a collective by its two halves: what every pass that makes one asynchronous does."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from autoshard.ir.rewrite import Rewriter
from autoshard.ops import collectives as ops

STARTS: dict[object, Callable[..., object]] = {
    ops.all_gather: ops.all_gather_start,
    ops.reduce_scatter: ops.reduce_scatter_start,
    ops.all_reduce: ops.all_reduce_start,
}


def split(rewriter: Rewriter, whole: Node, first: Node) -> tuple[Node, Node]:
    """Replace ``whole`` by a start where it stands and a wait right before ``first``.

    ``first`` is the earliest reader of the result. Returns (start, wait).
    """
    start_op = STARTS[whole.target]
    args = whole.args[:5] if start_op is ops.all_gather_start else whole.args
    with rewriter.before(whole):
        start = rewriter.call(start_op, *args, like=whole)
    with rewriter.before(first):
        wait = rewriter.call(ops.wait, start, like=whole)
    rewriter.replace(whole, wait)
    return start, wait
