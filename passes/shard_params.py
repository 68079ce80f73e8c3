"""Give every parameter that a tensor rule names its placement over the tensor-parallel axis.

The styles are Megatron-LM's column and row parallel layers and its split vocabulary. Which
dimension is "the outputs" follows from how the graph reads the weight: a Linear stores (out, in), a
Conv1D (in, out), an Embedding (rows, width). Nothing is computed here; what the placements ask of
activations is found by propagate-placements.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Node

from autoshard.compiler.pass_base import Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.diagnostics import InternalError, Label, PlacementError
from autoshard.dsl.resolve import ResolvedRule
from autoshard.ir.graph_function import PARAM
from autoshard.ir.node_info import info
from autoshard.ir.params import Copies, ParamSpec
from autoshard.ir.placement import REPLICATE, Placement, Shard, divides, normalize
from autoshard.ir.program import Level, Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ir.rules.call import tensor_inputs
from autoshard.passes._kept_heads import Kept, keep_heads
from autoshard.passes._padding import compute_padding

aten = torch.ops.aten
TURNED = (aten.t.default, aten.transpose.int, aten.permute.default)


@register
@dataclass(frozen=True)
class ShardParams(Pass):
    """Bind each tensor rule to the parameters of its module.

    rewrite: no node changes; ``fc.weight f32[64, 16]`` --> placed ``tp: S(0)``;
    ``colwise(replicate=2)`` repeats key heads, see ``_kept_heads``
    assumes nothing of placements; establishes ``params_placed``.
    """

    name = "shard-params"
    group = "tensor"
    level = Level.FORWARD
    assumes = frozenset({"global_loss"})
    establishes = frozenset({"params_placed"})

    axis: str = "tp"  # the mesh axis that weights are split over

    def run(self, program: Program, ctx: PassContext) -> None:
        """Place the parameters of every rule; refuse what doesn't divide or tie."""
        size = program.mesh.size(self.axis)
        if size == 1:
            return
        layouts = find_layouts(program)
        placed: dict[str, tuple[ResolvedRule, Placement]] = {}
        kept: dict[str, Kept] = {}
        for rule in ctx.resolved.tensor.values():
            for name in parameter_names(program, rule.path):
                spec = program.params[name]
                if spec.copies is not None:
                    continue
                if spec.fqn not in layouts:
                    ctx.missed(name, f"'{rule.style}' has no effect: no operator reads it")
                    continue
                found = placement_of(rule, name, spec, layouts[spec.fqn], size)
                _check_tie(placed, spec, rule, found)
                placed[spec.fqn] = (rule, found)
                if _copies(rule) > 1 and isinstance(found, Shard):
                    copies = _copies_in(rule, found, size)
                    kept[spec.fqn] = Kept(copies, rule)
                    program.params.update(spec.fqn, copies=copies)
        for fqn, (rule, found) in placed.items():
            _place(program.params[fqn], rule, found, self.axis, program, ctx)
        rewriter = Rewriter(program.forward, self.name)
        keep_heads(program, rewriter, kept, self.axis)
        rules = {fqn: rule for fqn, (rule, _) in placed.items()}
        compute_padding(program, rewriter, rules, self.axis)


@dataclass(frozen=True)
class Layout:
    """Say which dimensions of a stored weight are its outputs and inputs; None where unknown."""

    kind: str  # "linear", "conv1d", "embedding", "convolution", "vector", "other"
    outputs: int | None = None
    inputs: int | None = None


Reading = tuple[str, Layout]  # the module that reads the weight, and how
LINEAR = Layout("linear", 0, 1)
CONV1D = Layout("conv1d", 1, 0)
EMBEDDING = Layout("embedding")  # neither: `vocab` splits rows, `colwise` columns
CONVOLUTION = Layout("convolution", 0, 1)
VECTOR = Layout("vector", 0)
OTHER = Layout("other")


def find_layouts(program: Program) -> dict[str, tuple[Reading, ...]]:
    """Return by parameter how the graph reads it: module path and layout, each once."""
    readings: dict[str, dict[Reading, None]] = {}
    for fqn, node in program.forward.named(PARAM).items():
        found = readings.setdefault(fqn, {})
        vector = len(program.params[fqn].shape) == 1
        for user in node.users:
            found[info(user).path, VECTOR if vector else _read_by(user, node)] = None
    return {fqn: tuple(found) for fqn, found in readings.items()}


def _read_by(user: Node, weight: Node) -> Layout:
    """Return the layout that a reader implies; a turned weight is read by the reader of that."""
    if user.target in TURNED:
        inner = [_read_by(reader, user) for reader in user.users]
        turned = {LINEAR: CONV1D, CONV1D: LINEAR}
        return turned.get(inner[0], OTHER) if inner else OTHER
    place = tensor_inputs(user).index(weight) if user.op == "call_function" else -1
    if user.target is aten.linear.default and place == 1:
        return LINEAR
    if user.target in (aten.addmm.default, aten.mm.default, aten.matmul.default) and place:
        return CONV1D
    if user.target is aten.embedding.default and place == 0:
        return EMBEDDING
    if str(user.target).startswith("aten.conv") and place == 1:
        return CONVOLUTION
    return OTHER


def parameter_names(program: Program, path: str) -> tuple[str, ...]:
    """Return the names of the parameters that a rule's path means: one, or a module's own."""
    if path in program.params:
        return (path,)
    names = (name for spec in program.params for name in (spec.fqn, *spec.aliases))
    prefix = f"{path}." if path else ""
    return tuple(n for n in names if n.startswith(prefix) and "." not in n[len(prefix) :])


def placement_of(
    rule: ResolvedRule, name: str, spec: ParamSpec, readings: tuple[Reading, ...], size: int
) -> Placement:
    """Return where a rule puts one parameter."""
    if rule.style == "replicate" or spec.is_buffer:
        return REPLICATE
    found = {_dimension(rule.style, layout) for layout in _own(name, readings)}
    if len(found) != 1 or -1 in found:
        raise PlacementError(
            f"`{rule.style}` can't split `{name}` {list(spec.shape)}: the model reads it in"
            " another way",
            code="AS210",
            span=rule.rule.span,
            help="a linear layer, a Conv1D or an embedding can be split",
        )
    dim = found.pop()
    if dim is None:
        return REPLICATE
    if _copies(rule) > 1:
        return _kept_shard(rule, spec, dim, size)
    return normalize(Shard(dim, _blocks(rule, spec, dim, size)), spec.shape[dim])


def _is_computed(rule: ResolvedRule) -> bool:
    """Tell whether what a rule pads stays padded in the graph, until another layer sums it up."""
    return rule.style in ("colwise", "rowwise") and not rule.options.get("gather")


def _copies(rule: ResolvedRule) -> int:
    return rule.options.get("replicate", 1)


def _copies_in(rule: ResolvedRule, found: Shard, size: int) -> Copies:
    """Return what is kept several times of a weight that lies as ``found``, copies included."""
    times = _copies(rule)
    if not found.blocks:
        return Copies(found.dim, size // times, times)
    own, *rest = found.blocks
    return Copies(found.dim, size // times, times, own, len(rest))


def _kept_shard(rule: ResolvedRule, spec: ParamSpec, dim: int, size: int) -> Placement:
    """Return where a weight lies, with its copies, of which each key head is kept on n ranks."""
    if "pad" in rule.options:
        raise PlacementError(
            f"`{rule.path}` can't have `pad` beside `replicate`",
            code="AS402",
            span=rule.rule.span,
            label=f"{spec.fqn} is {list(spec.shape)}",
            help="heads that are kept on several ranks divide: leave `pad` out",
        )
    times, extent = _copies(rule), spec.shape[dim]
    pieces = size // times
    if _is_packed(rule):
        own, *rest = _part_sizes(rule, extent)
        fits = dim == 0 and own % size == 0 and len(set(rest)) == 1 and own + sum(rest) == extent
        if fits and size % times == 0 and rest[0] % pieces == 0:
            return Shard(dim, (own, *(part * times for part in rest)))
    elif size % times == 0 and extent % pieces == 0:
        return REPLICATE if times == size else Shard(dim)
    order = "; with `parts=[q, kv, kv]` queries come first, in a Linear"
    raise PlacementError(
        f"each head can't be kept on {times} of {size} ranks",
        code="AS402",
        span=rule.rule.span,
        label=f"{spec.fqn} is {list(spec.shape)}",
        help="`replicate` is tp / key heads" + order * _is_packed(rule),
    )


def _is_packed(rule: ResolvedRule) -> bool:
    return rule.options.get("parts", 1) != 1


def _part_sizes(rule: ResolvedRule, extent: int) -> tuple[int, ...]:
    parts = rule.options.get("parts", 1)
    return (extent // parts,) * parts if isinstance(parts, int) else tuple(parts)


def _own(name: str, readings: tuple[Reading, ...]) -> set[Layout]:
    """Return how the weight is read under this name: a tied one may be read in two ways."""
    module = name.rpartition(".")[0]
    own = {layout for path, layout in readings if path == module}
    return own or {layout for _, layout in readings}


def _dimension(style: str, layout: Layout) -> int | None:
    """Return the split dimension; None keeps the parameter whole, -1 can't be done."""
    if layout is VECTOR:
        return None if style == "rowwise" else 0
    if layout is EMBEDDING:
        return {"vocab": 0, "colwise": 1, "heads": 1}.get(style, -1)
    found = layout.inputs if style == "rowwise" else layout.outputs
    return -1 if found is None else found


def _blocks(rule: ResolvedRule, spec: ParamSpec, dim: int, size: int) -> tuple[int, ...]:
    """Return the parts of the dimension that are each split, checked and padded."""
    extent = spec.shape[dim]
    blocks = _part_sizes(rule, extent)
    is_whole = sum(blocks) == extent
    if is_whole and "pad" in rule.options:
        return _padded(rule, spec, dim, blocks, size)
    if not is_whole or any(block % size for block in blocks):
        raise _indivisible(rule, spec, dim, blocks, size)
    return blocks


def _padded(
    rule: ResolvedRule, spec: ParamSpec, dim: int, blocks: tuple[int, ...], size: int
) -> tuple[int, ...]:
    """Return the blocks with padding: the smallest one's decides, the others keep proportion."""
    step, smallest = rule.options["pad"] * size, min(blocks)
    longest = -(-smallest // step) * step
    found = tuple(block * longest // smallest for block in blocks)
    exact = all(block * longest % smallest == 0 for block in blocks)
    if not exact or any(block % size for block in found):
        raise _indivisible(rule, spec, dim, blocks, size)
    return found


def _indivisible(
    rule: ResolvedRule, spec: ParamSpec, dim: int, blocks: tuple[int, ...], size: int
) -> PlacementError:
    extent, shape = spec.shape[dim], list(spec.shape)
    if rule.style == "vocab":
        padded = -(-extent // (128 * size)) * 128 * size
        return PlacementError(
            f"a vocabulary of {extent} can't be split over tp = {size}",
            code="AS401",
            span=rule.rule.span,
            label=f"{spec.fqn} is {shape}",
            help=f"`vocab(pad=128)` pads it to {padded} (checkpoints keep {extent})",
        )
    side = "inputs" if rule.style == "rowwise" else "outputs"
    what = " + ".join(map(str, blocks)) if len(blocks) > 1 else str(extent)
    return PlacementError(
        f"{what} {side} can't be split over tp = {size}",
        code="AS405",
        span=rule.rule.span,
        label=f"{spec.fqn} is {shape}",
        help=f"every part must be a multiple of {size}",
    )


def _check_tie(
    placed: dict[str, tuple[ResolvedRule, Placement]],
    spec: ParamSpec,
    rule: ResolvedRule,
    found: Placement,
) -> None:
    """Refuse two rules that would split one tied weight differently."""
    other, before = placed.get(spec.fqn, (rule, found))
    if before == found:
        return
    names = " and ".join(f"`{name}`" for name in (spec.fqn, *spec.aliases))
    raise PlacementError(
        f"{names} are one tied weight but are split differently",
        code="AS404",
        span=rule.rule.span,
        label=f"{found} here",
        secondary=[Label(other.rule.span, f"{before} here")] if other.rule.span else [],
        help="give all its modules the same style",
    )


def _place(
    spec: ParamSpec,
    rule: ResolvedRule,
    found: Placement,
    axis: str,
    program: Program,
    ctx: PassContext,
) -> None:
    """Write the placement into the table; a padded shard is an even one of the padded shape."""
    if not isinstance(found, Shard):
        return
    padded = None
    if sum(found.blocks or (spec.whole_shape[found.dim],)) != spec.whole_shape[found.dim]:
        padded = tuple(
            sum(found.blocks) if dim == found.dim else extent
            for dim, extent in enumerate(spec.shape)
        )
        ctx.note(spec.fqn, f"padded from {list(spec.shape)} to {list(padded)}")
        found = normalize(found, padded[found.dim])
    if not divides(found, padded or spec.whole_shape, program.mesh.size(axis)):
        raise InternalError(f"'{spec.fqn}' does not divide as {found}")
    program.params.update(
        spec.fqn,
        placements={**spec.placements, axis: found},
        padded=padded,
        is_widened=padded is not None and _is_computed(rule),
    )
    share = prod(padded or spec.whole_shape) // program.mesh.size(axis)
    ctx.applied(spec.fqn, f"{rule.style}: {axis} {found}, {share} elements a rank")
