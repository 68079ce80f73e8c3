"""Join the buckets of single parameters into flat buckets of the plan's size.

Flat buffers per module are what FSDP and DeepSpeed gather; buckets by bytes are DDP's for
gradients. This pass does not move collectives or overlap them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.fx import Node

from autoshard.compiler.pass_base import Numerics, Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.diagnostics import PlanError, VerifyError
from autoshard.ir.buckets import (
    COMPUTE_PHASES,
    buckets_of,
    build_storage_graphs,
    cast,
    flat_placeholder,
    gathers_of,
    number_types,
    reduce_dtype,
    uncast,
)
from autoshard.ir.graph_function import FLAT, FLAT_GRAD, GraphFunction, Port
from autoshard.ir.node_info import origin
from autoshard.ir.params import Flat, ParamSpec, Whole
from autoshard.ir.program import Bucket, Level, Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ops.collectives import all_gather, pack, reduce_scatter, view_at
from autoshard.passes._schedules import stage_ranks
from autoshard.passes._zero import ZeroPolicy, numel, pack_args, padded

aten = torch.ops.aten


@register
@dataclass(frozen=True)
class BucketCollectives(Pass):
    """Gather and reduce several parameters at once.

        all_gather(flat w), all_gather(flat b)  -->  g = all_gather(flat unit)
                                                     view_at(g, 0), view_at(g, w.numel())
        reduce_scatter(pack([dw])), ...         -->  reduce_scatter(pack([dw, db]))

    Parameters that phases gather (ZeRO 3) or whose gradients they reduce (2) share a bucket within
    a unit only: a repeated block, or what stands before, between or after the blocks. So no more
    than a unit is whole at once, and a reduction runs beside the next unit's backward. All others
    share buckets across units. A bucket holds at most `gather_bucket` and `reduce_bucket` bytes;
    only a single parameter may be larger.
    A parameter tied over pipeline stages keeps a bucket of its own.
    """

    name: ClassVar[str] = "bucket-collectives"
    group: ClassVar[str] = "zero"
    level: ClassVar[Level] = Level.JOINT
    assumes: ClassVar[frozenset[str]] = frozenset({"gathered"})
    establishes: ClassVar[frozenset[str]] = frozenset({"bucketed"})
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATES

    def run(self, program: Program, ctx: PassContext) -> None:
        """Replace ``program.buckets`` and the collectives on them."""
        policy = ZeroPolicy.of(ctx.resolved)
        merges = _plan(program, policy, ctx)
        if [m.fqns for m in merges] == [b.fqns for b in program.buckets]:
            return
        old = {fqn: bucket for bucket in program.buckets for fqn in bucket.fqns}
        new = [merge.bucket(program, policy) for merge in merges]
        for stage in program.stages:
            held = {b.name for b in buckets_of(program, stage)}
            for bucket in new:
                members = [old[fqn] for fqn in bucket.fqns]
                if members[0].name in held and bucket.axis and members != [bucket]:
                    _rewrite(stage.phases, bucket, members, program, policy)
        program.buckets = tuple(new)
        build_storage_graphs(program, self.name, stage_ranks(ctx.resolved))


@dataclass
class _Merge:
    """A bucket to be: its parameters in order and what they have in common."""

    stage: int
    unit: str
    is_cut: bool
    trained: bool
    dtype: torch.dtype
    tied: tuple[int, ...]
    name: str = ""
    entries: list[ParamSpec] = field(default_factory=list)
    nbytes: int = 0

    @property
    def fqns(self) -> tuple[str, ...]:
        return tuple(entry.fqn for entry in self.entries)

    def bucket(self, program: Program, policy: ZeroPolicy) -> Bucket:
        """Give the parameters their places and return the bucket."""
        offset = 0
        for entry in self.entries:
            length = numel(entry, program)
            flat = Flat(self.name, offset, length, policy.axis)
            storage = flat if self.is_cut else Whole(self.name, offset)
            program.params.update(entry.fqn, storage=storage)
            offset += length
        total = padded(offset, policy.size) if self.is_cut else offset
        axis = policy.axis if self.is_cut else None
        fixed = (self.name, self.stage, self.fqns, total, self.dtype, axis, self.tied)
        away = policy.offload(self.is_cut, self.trained)
        return Bucket(*fixed, *number_types(program, self.entries[0]), *away)


def _plan(program: Program, policy: ZeroPolicy, ctx: PassContext) -> list[_Merge]:
    """Return the buckets to be, in the order of the model's parameters.

    The model's own order is the same in every program of a model, for training and evaluation: all
    of them share one storage.
    """
    globs = policy.globs()
    stored = [entry for entry in program.params if entry.homes and not entry.is_buffer]
    for glob in globs:
        if not any(policy.unit(entry.fqn, (glob,)) != "root" for entry in stored):
            raise PlanError(
                f"`{glob.text}` in `units` names no module with parameters",
                code="AS314",
                span=ctx.resolved.plan.span("zero.units"),
                help="name modules: `units = h.*`, or leave it `auto`",
            )
    merges: list[_Merge] = []
    for entry in stored:
        wanted = _start(entry, program, policy, policy.unit(entry.fqn, globs))
        nbytes = numel(entry, program) * entry.dtype.itemsize
        target = _open_bucket(merges, wanted, policy, nbytes)
        target.entries.append(entry)
        target.nbytes += nbytes
    _name(merges)
    return merges


def _start(entry: ParamSpec, program: Program, policy: ZeroPolicy, unit: str) -> _Merge:
    tied = entry.homes if len(entry.homes) > 1 else ()
    is_cut = policy.cuts(entry, program)
    return _Merge(entry.homes[0], unit, is_cut, entry.requires_grad, entry.dtype, tied)


def _open_bucket(merges: list[_Merge], wanted: _Merge, policy: ZeroPolicy, nbytes: int) -> _Merge:
    """Return the bucket that takes a parameter: the last one of its kind, or a new one."""
    kind = (wanted.stage, wanted.is_cut, wanted.trained, wanted.dtype)
    alike = [m for m in merges if (m.stage, m.is_cut, m.trained, m.dtype) == kind and not m.tied]
    last = alike[-1] if alike and not wanted.tied else None
    by_unit = policy.reduces_per_microbatch and wanted.is_cut
    fits = last is not None and last.nbytes + nbytes <= _limit(wanted, policy)
    if last is not None and fits and (last.unit == wanted.unit or not by_unit):
        return last
    merges.append(wanted)
    return wanted


def _limit(merge: _Merge, policy: ZeroPolicy) -> float:
    """Return the most bytes of a bucket: it is gathered and reduced as one."""
    itemsize = merge.dtype.itemsize
    limits = []
    if merge.is_cut:
        limits.append(policy.block.gather_bucket.bytes(itemsize))
    if merge.trained:
        limits.append(policy.block.reduce_bucket.bytes(itemsize))
    return min(limits, default=float("inf"))


def _name(merges: list[_Merge]) -> None:
    taken: set[str] = set()
    for merge in merges:
        base = merge.entries[0].fqn if merge.tied else merge.unit
        base = f"s{merge.stage}.{base}" + ("" if merge.trained else ":frozen")
        names = (base if n == 1 else f"{base}#{n}" for n in range(1, len(merges) + 2))
        merge.name = next(name for name in names if name not in taken)
        taken.add(merge.name)


def _rewrite(
    phases: dict[str, GraphFunction],
    bucket: Bucket,
    members: list[Bucket],
    program: Program,
    policy: ZeroPolicy,
) -> None:
    offsets = [program.params[fqn].storage.offset for fqn in bucket.fqns]
    for phase in COMPUTE_PHASES:
        if phase in phases:
            rewriter = Rewriter(phases[phase], BucketCollectives.name)
            _merge_gathers(rewriter, bucket, dict(zip(members, offsets, strict=True)), policy)
            _merge_reductions(rewriter, bucket, members, program, policy)


def _merge_gathers(
    rewriter: Rewriter, bucket: Bucket, offsets: dict[Bucket, int], policy: ZeroPolicy
) -> None:
    """Gather the bucket before the first of the parameters that this phase reads."""
    function = rewriter.function
    found = gathers_of(function)
    names = {member.name: offset for member, offset in offsets.items()}
    old = [(name, node) for name, node in found.items() if name in names]
    if not old:
        return
    first = old[0][1]
    mode, length = rewriter.fake_mode(), bucket.length // policy.size
    flat = flat_placeholder(rewriter, bucket, FLAT, length, mode)
    with rewriter.before(first):
        narrow = cast(rewriter, flat, bucket.read_dtype, span=policy.span)
        args = (narrow, 0, [], policy.axis, policy.size)
        whole = rewriter.call(all_gather, *args, like=first)
    for name, gather in old:
        for view in list(gather.users):
            if view.target is not view_at:
                raise VerifyError(
                    f"the gathered bucket `{name}` is not read by views alone: %{view.name} of "
                    f"{origin(view)} reads it"
                )
            rewriter.set_args(view, whole, names[name], view.args[2])
        shard = gather.args[0]
        rewriter.graph.erase_node(gather)
        if uncast(shard) is not shard:
            rewriter.graph.erase_node(shard)
        rewriter.drop_input(Port(FLAT, name))


def _merge_reductions(
    rewriter: Rewriter,
    bucket: Bucket,
    members: list[Bucket],
    program: Program,
    policy: ZeroPolicy,
) -> None:
    """Reduce the bucket once the last gradient of its parameters is there."""
    function = rewriter.function
    ports = {Port(FLAT_GRAD, member.name): member for member in members}
    pairs = list(zip(function.outputs, function.results, strict=True))
    old = {ports[port]: node for port, node in pairs if port in ports}
    if not old:
        return
    order = {node: index for index, node in enumerate(function.graph.nodes)}
    last = max(old.values(), key=order.__getitem__)
    with rewriter.after(last):
        grads = list(_gradients(rewriter, members, old, program, last))
        args = pack_args(grads, bucket.length, reduce_dtype(program, bucket))
        packed = rewriter.call(pack, *args, like=last)
        shard = rewriter.call(reduce_scatter, packed, 0, [], policy.axis, policy.size, like=last)
    kept = [(port, node) for port, node in pairs if port not in ports]
    kept.append((Port(FLAT_GRAD, bucket.name), shard))
    function.set_outputs([node for _, node in kept], [port for port, _ in kept])
    for scattered in old.values():
        (old_pack,) = scattered.all_input_nodes
        rewriter.graph.erase_node(scattered)
        rewriter.graph.erase_node(old_pack)


def _gradients(
    rewriter: Rewriter,
    members: list[Bucket],
    old: dict[Bucket, Node],
    program: Program,
    like: Node,
) -> Iterator[Node]:
    """Yield the gradient of each parameter in order, zeros where there is none."""
    for member in members:
        if member in old:
            yield _packed(member, old[member])
            continue
        shape = list(program.params[member.fqns[0]].local_shape(program.mesh))
        example = _packed(*next(iter(old.items())))
        yield rewriter.call(aten.new_zeros.default, example, shape, like=like)


def _packed(member: Bucket, result: Node) -> Node:
    """Return the gradient that a bucket of one parameter reduces: reduce_scatter(pack([it]))."""
    packed = result.args[0] if result.target is reduce_scatter else None
    if isinstance(packed, Node) and packed.target is pack:
        return packed.args[0][0]
    broken = result if packed is None else packed
    raise VerifyError(
        f"the gradient of `{member.name}` leaves as no reduce_scatter of a pack: it reads "
        f"%{broken.name} of {origin(broken)}"
    )
