"""What to say when a split can't be carried on: packed weights, heads that don't divide.

Where the plan is at fault the error names its line, the later line of the model that shows it, and
the option that is right. Anything else is gathered, and the remark says what that costs.
"""

from __future__ import annotations

from math import prod

import torch
from torch.fx import Node

from autoshard.compiler.pass_base import PassContext
from autoshard.diagnostics import PlacementError
from autoshard.dsl.resolve import ResolvedRule
from autoshard.ir.node_info import info, val
from autoshard.ir.padding import ROLE as PADDING
from autoshard.ir.placement import Shard
from autoshard.ir.rules.call import Choice, bound_arguments, shapes_of, tensor_inputs
from autoshard.passes._placing import Reader

aten = torch.ops.aten


def refuse(
    node: Node, choice: Choice, reader: Reader, rule: ResolvedRule | None, ctx: PassContext
) -> None:
    """Raise AS402 or AS403 where the plan is at fault, else remark that the value is gathered."""
    (x,) = tensor_inputs(node)
    shard = reader.read(x)
    if shard == reader.token_shard(x):
        rule = None  # the plan splits weights; that the tokens can't stay split is not its fault
    if rule is not None and choice.refusal == "heads":
        _check_heads(node, x, shard, reader, rule)
    if rule is not None and choice.refusal == "packed":
        _check_packed(node, x, shard, reader, rule)
    shape = list(val(x).shape)
    ctx.missed(node, f"gathers {shape} {shard}: '{node.target}' can't keep it split")


def refuse_unlike(node: Node, reader: Reader, rule: ResolvedRule | None) -> None:
    """Raise AS402 where what a rule splits without padding meets values that others pad."""
    if info(node).role != PADDING or rule is None:
        return
    (x,) = tensor_inputs(node)
    held = reader.read(x)
    before, after = shapes_of(x)[0], shapes_of(node)[0]
    if not isinstance(held, Shard) or before[held.dim] == after[held.dim]:
        return
    extents = f"{before[held.dim]} to {after[held.dim]}"
    raise PlacementError(
        f"`{rule.path}` meets values that are padded from {extents}, and is not padded",
        code="AS402",
        span=rule.rule.span,
        label=f"splits {before[held.dim]} in equal parts",
        help=f"pad all or none: `{rule.style}(pad=..)` in the same proportion",
        notes=_later(node),
    )


def _check_heads(node: Node, x: Node, shard: Shard, reader: Reader, rule: ResolvedRule) -> None:
    """Raise when the reshape takes a split dimension apart into heads that don't divide."""
    parts = _taken_apart(shapes_of(x)[0], shapes_of(node)[0], shard.dim)
    if not parts:
        return
    count, *rest = parts
    if len(shard.blocks) > 1 and _parts_of(rule) > 1:
        raise _wrong_parts(node, shard, reader, rule, parts)
    if len(rest) > 1 and rest[0] % reader.size == 0:
        raise _packed(node, rule, str(count), f"{count} parts of {prod(rest)}")
    fits = ", ".join(str(d) for d in range(2, count + 1) if count % d == 0)
    raise PlacementError(
        f"{count} heads can't be split over {reader.axis} = {reader.size}",
        code="AS402",
        span=rule.rule.span,
        label=f"{rule.path}: {count} heads x {prod(rest)}",
        help=_ways_out(reader, rule, parts, fits),
        notes=_later(node),
    )


def _ways_out(
    reader: Reader, rule: ResolvedRule, parts: tuple[int, ...], fits: str
) -> tuple[str, ...]:
    """Return what to write instead; key heads, unlike query heads, may be kept on several ranks."""
    count, axis = parts[0], reader.axis
    help = [f"{axis} must divide {count}: {fits}" if fits else "leave its layers whole"]
    if rule.style == "colwise" and len(parts) == 2 and reader.size % count == 0:
        times = reader.size // count
        help.append(f"key/value heads: `colwise(replicate={times})` keeps each on {times} ranks")
    elif rule.style == "colwise":
        unit, heads = prod(parts[1:]), -(-count // reader.size) * reader.size
        help.append(
            f"`pad={unit}` in this rule pads to {heads} heads (checkpoints keep {count}), with"
            " `rowwise(pad=..)` of as many for the layer that reads them"
        )
    return tuple(help)


def _wrong_parts(
    node: Node, shard: Shard, reader: Reader, rule: ResolvedRule, apart: tuple[int, ...]
) -> PlacementError:
    """Return the error for a weight that lies head by head, which the plan splits part by part."""
    count, *rest = apart
    fits = count % reader.size == 0
    return PlacementError(
        f"`{rule.path}` is not packed as `parts` says: it is taken apart as"
        f" {' x '.join(map(str, apart))}",
        code="AS403",
        span=rule.rule.span,
        label=f"this splits {_split_sizes(shard)}",
        help=f"`{rule.style}` without parts keeps whole groups: {count} of {prod(rest)}"
        if fits
        else f"{reader.axis} must divide {count} for `{rule.style}` without parts",
        notes=_later(node),
    )


def _parts_of(rule: ResolvedRule) -> int:
    parts = rule.options.get("parts", 1)
    return len(parts) if isinstance(parts, tuple) else parts


def _split_sizes(shard: Shard) -> str:
    return " + ".join(map(str, shard.blocks))


def _taken_apart(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """Return the output dims that ``dim`` is taken apart into; nothing when it isn't."""
    outer = prod(before[:dim])
    for start in range(len(after)):
        if prod(after[:start]) != outer or after[start] == 1:
            continue
        for end in range(start + 2, len(after) + 1):
            if prod(after[start:end]) == before[dim]:
                return after[start:end]
    return ()


def _check_packed(node: Node, x: Node, shard: Shard, reader: Reader, rule: ResolvedRule) -> None:
    """Raise when the pieces of a split dimension are not the blocks that the plan splits."""
    extent = shapes_of(x)[0][shard.dim]
    lengths = _lengths(node, x, shard.dim)
    if sum(lengths) != extent:
        return
    equal = len(set(lengths)) == 1
    parts = str(len(lengths)) if equal else f"[{', '.join(map(str, lengths))}]"
    what = f"{' + '.join(map(str, lengths))} along dim {shard.dim}"
    split = _split_sizes(shard) if _parts_of(rule) > 1 else ""
    raise _packed(node, rule, parts, what, split)


def _lengths(node: Node, x: Node, dim: int) -> list[int]:
    """Return the lengths of the pieces that all readers together take from the dimension."""
    if node.target in (aten.select.int, aten.unbind.int):
        return [1] * shapes_of(x)[0][dim]
    if node.target not in (aten.slice.Tensor, aten.narrow.default):
        return [shape[dim] for shape in shapes_of(node)]
    cuts = [user for user in x.users if user.target is node.target]
    bounds = {_start(user): shapes_of(user)[0][dim] for user in cuts if _along(user, dim)}
    return [bounds[start] for start in sorted(bounds)]


def _along(node: Node, dim: int) -> bool:
    given = bound_arguments(node)
    return given["dim"] % len(shapes_of(node)[0]) == dim


def _start(node: Node) -> int:
    return bound_arguments(node)["start"] or 0


def _packed(
    node: Node, rule: ResolvedRule, parts: str, what: str, split: str = ""
) -> PlacementError:
    plain = f"a plain {rule.style} would give rank 0 all of the first part"
    return PlacementError(
        f"`{rule.path}` packs several parts in one weight: {what}",
        code="AS403",
        span=rule.rule.span,
        label=f"this splits {split}" if split else plain,
        help=f"`{rule.style}(parts={parts})` splits each part",
        notes=_later(node),
    )


def _later(node: Node) -> tuple[str, ...]:
    source = info(node).source
    return (f"its outputs are taken apart at {source}",) if source else ()
