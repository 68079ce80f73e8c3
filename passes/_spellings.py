"""One rule per operator that has a canonical spelling: the node it becomes, None to keep it.

Used by the pass `canonicalize` alone. A rule's new nodes stand right before the old one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import Node

from autoshard.ir.node_info import val
from autoshard.ir.rewrite import Rewriter

aten = torch.ops.aten
Rule = Callable[[Rewriter, Node], Node | None]

# Factories -> what they fill with; None: the second argument says it.
FILLS = {
    aten.ones.default: 1,
    aten.zeros.default: 0,
    aten.new_ones.default: 1,
    aten.new_zeros.default: 0,
    aten.full.default: None,
    aten.new_full.default: None,
}


def positive(dims: object, rank: int) -> object:
    """Return dimensions counted from the front: -1 of three is 2."""
    if isinstance(dims, list | tuple):
        return [positive(dim, rank) for dim in dims]
    is_behind = isinstance(dims, int) and not isinstance(dims, bool) and dims < 0
    return dims + rank if is_behind and rank else dims


def _argument(node: Node, place: int, name: str, default: object = None) -> object:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _same(node: Node) -> Node | None:
    """Return the input when the result is the same value: equal shape and type."""
    source = node.args[0]
    same = val(source).shape == val(node).shape and val(source).dtype == val(node).dtype
    return source if same else None


def _cast(rewriter: Rewriter, node: Node) -> Node | None:
    if _same(node) is not None:
        return node.args[0]
    if dict(node.kwargs) == {"dtype": val(node).dtype} and len(node.args) == 1:
        return None
    return rewriter.call(aten._to_copy.default, node.args[0], like=node, dtype=val(node).dtype)


def _reshape(rewriter: Rewriter, node: Node) -> Node | None:
    source = node.args[0]
    if source.target is not aten.reshape.default:
        return _same(node)
    inner = source.args[0]
    if val(inner).shape == val(node).shape:
        return inner
    return rewriter.call(aten.reshape.default, inner, node.args[1], like=node)


def _expand(rewriter: Rewriter, node: Node) -> Node | None:
    shape = list(val(node).shape)
    if _same(node) is not None or list(node.args[1]) == shape:
        return _same(node)
    return rewriter.call(aten.expand.default, node.args[0], shape, like=node)


def _slice(rewriter: Rewriter, node: Node) -> Node | None:
    dim = _argument(node, 1, "dim", 0)
    extent = val(node.args[0]).shape[dim]
    given = (_argument(node, 2, "start"), _argument(node, 3, "end"), _argument(node, 4, "step", 1))
    start, end, step = slice(*given).indices(extent)
    if (start, end, step) == (0, extent, 1):
        return node.args[0]
    wanted = (node.args[0], dim, start, end) + ((step,) if step != 1 else ())
    if node.args == wanted:
        return None
    return rewriter.call(aten.slice.Tensor, *wanted, like=node)


def _split(rewriter: Rewriter, node: Node) -> Node | None:
    dim = positive(_argument(node, 2, "dim", 0), val(node.args[0]).dim())
    sizes = [part.shape[dim] for part in val(node)]
    wanted = (node.args[0], sizes, dim)
    if node.target is aten.split_with_sizes.default and node.args == wanted:
        return None
    return rewriter.call(aten.split_with_sizes.default, *wanted, like=node)


def _item(rewriter: Rewriter, node: Node) -> Node | None:
    """Take a part of broadcast_tensors as what it is: an input, expanded where it is smaller.

    torch's regression losses (mse_loss, l1_loss, huber_loss) call it whatever the shapes.
    """
    source, index = node.args
    if source.target is not aten.broadcast_tensors.default:
        return None
    part, shape = source.args[0][index], list(val(node).shape)
    if list(val(part).shape) == shape:
        return part
    return rewriter.call(aten.expand.default, part, shape, like=node)


def _squeeze(rewriter: Rewriter, node: Node) -> Node | None:
    source = node.args[0]
    dims = node.args[1] if len(node.args) > 1 else range(val(source).dim())
    dims = [dims] if isinstance(dims, int) else dims
    ones = [dim for dim in dims if val(source).shape[dim] == 1]
    if not ones:
        return source
    if node.target is aten.squeeze.dims and list(node.args[1]) == ones:
        return None
    return rewriter.call(aten.squeeze.dims, source, ones, like=node)


def _permute(rewriter: Rewriter, node: Node) -> Node | None:
    order = list(node.args[1])
    moved = [dim for dim, source in enumerate(order) if dim != source]
    if not moved:
        return node.args[0]
    if len(moved) != 2:
        return None
    return rewriter.call(aten.transpose.int, node.args[0], *moved, like=node)


def _t(rewriter: Rewriter, node: Node) -> Node | None:
    if val(node).dim() < 2:
        return node.args[0]
    return rewriter.call(aten.transpose.int, node.args[0], 0, 1, like=node)


def _fill(rewriter: Rewriter, node: Node) -> Node | None:
    """Write every constant as full(shape, number, dtype)."""
    is_new = node.all_input_nodes != []
    fill = FILLS[node.target]
    if fill is None:
        fill = node.args[2 if is_new else 1]
    dtype = val(node).dtype
    if isinstance(fill, Node) or (
        node.target is aten.full.default and node.kwargs.get("dtype") is dtype
    ):
        return None
    fill = bool(fill) if dtype is torch.bool else fill
    shape = list(val(node).shape)
    return rewriter.call(aten.full.default, shape, fill, like=node, dtype=dtype, device="cpu")


def _typed(rewriter: Rewriter, node: Node) -> Node | None:
    """Name the type of a range, lest it follow torch's default type at run time."""
    if node.kwargs.get("dtype") is None:
        node.kwargs = {**node.kwargs, "dtype": val(node).dtype}
        rewriter.annotate(node)
    return None


def _add(rewriter: Rewriter, node: Node) -> Node | None:
    return _same(node) if _is_number(node.args[1], 0) else None


def _multiply(rewriter: Rewriter, node: Node) -> Node | None:
    return _same(node) if _is_number(node.args[1], 1) else None


def _is_number(value: object, number: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == number


def _masked_fill(rewriter: Rewriter, node: Node) -> Node | None:
    """Fill with a number where the filler is a constant."""
    x, mask, filler = node.args
    if filler.target is not aten.full.default:
        return None
    return rewriter.call(aten.masked_fill.Scalar, x, mask, filler.args[1], like=node)


def _copy(rewriter: Rewriter, node: Node) -> Node:
    """The second argument in the type and shape of what it overwrites."""
    source, like = node.args[1], val(node)
    if val(source).dtype != like.dtype:
        source = rewriter.call(aten._to_copy.default, source, like=node, dtype=like.dtype)
    if val(source).shape != like.shape:
        source = rewriter.call(aten.expand.default, source, list(like.shape), like=node)
    return source


def _overwrite(rewriter: Rewriter, node: Node) -> Node:
    """Functional fill_: a constant, or a 0-d value repeated."""
    filler = node.args[1]
    if isinstance(filler, Node) and filler.target is aten.full.default:
        filler = filler.args[1]
    if isinstance(filler, Node):
        return _copy(rewriter, node)
    shape, dtype = list(val(node).shape), val(node).dtype
    return rewriter.call(aten.full.default, shape, filler, like=node, dtype=dtype, device="cpu")


def _slice_scatter(rewriter: Rewriter, node: Node) -> Node | None:
    """Functional x[a:b] = y: what is before, y, what is behind."""
    dim = _argument(node, 2, "dim", 0)
    given = (_argument(node, 3, "start"), _argument(node, 4, "end"), _argument(node, 5, "step", 1))
    start, end, step = slice(*given).indices(val(node).shape[dim])
    if step != 1:
        return None
    return _put_between(rewriter, node, node.args[1], dim, start, end)


def _select_scatter(rewriter: Rewriter, node: Node) -> Node:
    """Functional x[i] = y."""
    _, source, dim, index = node.args
    start = index % val(node).shape[dim]
    source = rewriter.call(aten.unsqueeze.default, source, dim, like=node)
    return _put_between(rewriter, node, source, dim, start, start + 1)


def _put_between(
    rewriter: Rewriter, node: Node, source: Node, dim: int, start: int, end: int
) -> Node:
    x, extent = node.args[0], val(node).shape[dim]
    parts = [source]
    if start > 0:
        parts.insert(0, rewriter.call(aten.slice.Tensor, x, dim, 0, start, like=node))
    if end < extent:
        parts.append(rewriter.call(aten.slice.Tensor, x, dim, end, extent, like=node))
    return rewriter.call(aten.cat.default, parts, dim, like=node) if len(parts) > 1 else source


def _pool(rewriter: Rewriter, node: Node) -> Node | None:
    """An average pool to one place as the mean that it is: torch restrides it in place."""
    sizes, rank = node.args[1], val(node).dim()
    if any(size != 1 for size in sizes):
        return None
    dims = list(range(rank - len(sizes), rank))
    return rewriter.call(aten.mean.dim, node.args[0], dims, True, like=node)


def _nll(rewriter: Rewriter, node: Node) -> Node | None:
    """A likelihood of a log-softmax over the classes is a cross entropy of what it was taken of."""
    turned = node.args[0]
    inner, dim = turned, min(1, val(turned).dim() - 1)
    if turned.target in (aten.permute.default, aten.transpose.int):
        inner, dim = turned.args[0], _source_dim(turned, dim)
    if inner.target is not aten.log_softmax.int or inner.args[1] % val(inner).dim() != dim:
        return None
    x = inner.args[0]
    if val(x).dtype != val(inner).dtype:
        x = rewriter.call(aten._to_copy.default, x, like=node, dtype=val(inner).dtype)
    if turned is not inner:
        x = rewriter.call(turned.target, x, *turned.args[1:], like=node)
    rest = [_argument(node, 2, "weight"), _argument(node, 3, "reduction", 1)]
    ignored = _argument(node, 4, "ignore_index", -100)
    return rewriter.call(
        aten.cross_entropy_loss.default, x, node.args[1], *rest, ignored, 0.0, like=node
    )


def _source_dim(turned: Node, dim: int) -> int:
    """Return which dim of what is turned becomes ``dim``."""
    rank = val(turned).dim()
    if turned.target is aten.permute.default:
        return turned.args[1][dim] % rank
    a, b = (d % rank for d in turned.args[1:])
    return {a: b, b: a}.get(dim, dim)


RULES: dict[object, Rule] = {
    operator.getitem: _item,
    aten._to_copy.default: _cast,
    aten.to.dtype: _cast,
    aten.reshape.default: _reshape,
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.permute.default: _permute,
    aten.t.default: _t,
    aten.arange.default: _typed,
    aten.arange.start: _typed,
    aten.arange.start_step: _typed,
    aten.add.Tensor: _add,
    aten.sub.Tensor: _add,
    aten.mul.Tensor: _multiply,
    aten.div.Tensor: _multiply,
    aten.masked_fill.Tensor: _masked_fill,
    aten.adaptive_avg_pool1d.default: _pool,
    aten.adaptive_avg_pool2d.default: _pool,
    aten.adaptive_avg_pool3d.default: _pool,
    aten.nll_loss.default: _nll,
    aten.nll_loss_nd.default: _nll,
    aten.fill.Tensor: _overwrite,
    aten.fill.Scalar: _overwrite,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    **dict.fromkeys(FILLS, _fill),
}
