"""Which part of a dropout's mask a rank draws, beside what it holds of the value."""

from __future__ import annotations

from torch.fx import Node

from autoshard.ir.placement import Shard
from autoshard.mesh import is_data_parallel
from autoshard.ops.bias_dropout_add_layer_norm import backward as dropout_add_norm_backward
from autoshard.ops.bias_dropout_add_layer_norm import bias_dropout_add_layer_norm
from autoshard.ops.dropout import DropoutArgs, dropout

# Where the value that is masked stands among the arguments, and where the mask's own begin.
_PLACES: dict[object, tuple[int, int]] = {
    dropout: (0, 1),
    bias_dropout_add_layer_norm: (0, 6),
    dropout_add_norm_backward: (2, 8),
}


def mask_of(node: Node) -> DropoutArgs | None:
    """Return the arguments of the dropout that a call makes, None where it makes none."""
    if node.target not in _PLACES:
        return None
    value, mask = _PLACES[node.target]
    return DropoutArgs(node.args[value], *node.args[mask:])


def mask_problem(args: DropoutArgs, held: object, axis: str) -> str:
    """Say how the part that is drawn differs from the part that is ``held`` along an axis.

    Over data parallel ranks only the dim of the samples is told; "" where nothing differs.
    """
    if is_data_parallel(axis):
        told = [] if args.batch_dim < 0 else [args.batch_dim]
        have: list[object] = [held.dim] if isinstance(held, Shard) else []
    else:
        told = [Shard(dim, blocks) for dim, blocks, along in args.shards() if along == axis]
        have = [held] if isinstance(held, Shard) else []
    if told == have:
        return ""
    split = ", ".join(map(str, told)) or "nothing"
    return f"reads {held} and draws its mask as if it were split along {split}"
