"""Decide what each data parallel rank stores, and make gathers and reductions explicit.

ZeRO (Rajbhandari et al. 2020): stage 1 cuts optimizer state, 2 gradients too, 3 parameters too.
This pass gives every parameter a bucket of its own; `bucket-collectives` joins them, later passes
make the collectives asynchronous and move them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from autoshard.compiler.pass_base import Numerics, Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.ir.buckets import (
    COMPUTE_PHASES,
    build_storage_graphs,
    cast,
    flat_placeholder,
    number_types,
    reduce_dtype,
)
from autoshard.ir.graph_function import FLAT, FLAT_GRAD, GRAD, PARAM, GraphFunction, Port
from autoshard.ir.params import Flat, ParamSpec, Whole
from autoshard.ir.program import Bucket, Level, Program
from autoshard.ir.rewrite import Rewriter
from autoshard.ops.collectives import all_gather, pack, reduce_scatter, view_at
from autoshard.passes._schedules import stage_ranks
from autoshard.passes._zero import ZeroPolicy, numel, pack_args, padded


@register
@dataclass(frozen=True)
class ShardStorage(Pass):
    """Store parameters in flat buckets, cut over dp as the ZeRO stage says.

        y = mm(x, w)                -->  y = mm(x, view_at(all_gather(flat w, "dp")))   # stage 3
        return dw                   -->  return reduce_scatter(pack([dw]), "dp")        # 2 and 3
        R = nothing                 -->  R = reduce_scatter(accumulated dw, "dp")       # 1
        R = nothing                 -->  R = all_reduce(accumulated dw, "dp")           # 0

    Gradients are sums over dp: the loss is already that of the whole batch. Stages 1 and 2 gather
    updated parameters by U, once per step. Stage 3 gathers in each phase that reads a parameter; a
    parameter below `param_persistence_threshold` stays whole and is reduced once per step. Frozen
    parameters are cut by stage 3 only and never reduced. A parameter tied over pipeline stages ends
    R with a sum over those. Bytes per step and rank, of P parameter bytes: 2P for stages 0 and 1;
    for m microbatches (1 + m) P for 2 and 3m P for 3.
    """

    name: ClassVar[str] = "shard-storage"
    group: ClassVar[str] = "zero"
    level: ClassVar[Level] = Level.JOINT
    assumes: ClassVar[frozenset[str]] = frozenset({"phased"})
    establishes: ClassVar[frozenset[str]] = frozenset({"gathered"})
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATES

    def run(self, program: Program, ctx: PassContext) -> None:
        """Fill ``program.buckets``, rewrite the phases, build U and R."""
        if program.buckets:
            return
        policy = ZeroPolicy.of(ctx.resolved)
        ranks = stage_ranks(ctx.resolved)
        stored = [entry for entry in program.params if entry.homes and not entry.is_buffer]
        for entry in stored:
            _place(entry, program, policy)
        for stage in program.stages:
            for phase in COMPUTE_PHASES:
                if phase in stage.phases:
                    _rewrite(stage.phases[phase], program, policy)
        build_storage_graphs(program, self.name, ranks)
        _report(stored, program, policy, ctx)


def _place(entry: ParamSpec, program: Program, policy: ZeroPolicy) -> None:
    """Give a parameter a bucket of its own."""
    length, name = numel(entry, program), f"s{entry.homes[0]}.{entry.fqn}"
    is_cut = policy.cuts(entry, program)
    axis = policy.axis if is_cut else None
    storage = Flat(name, 0, length, axis) if is_cut else Whole(name, 0)
    tied = entry.homes if len(entry.homes) > 1 else ()
    total = padded(length, policy.size) if is_cut else length
    types = (*number_types(program, entry), *policy.offload(is_cut, entry.requires_grad))
    bucket = Bucket(name, entry.homes[0], (entry.fqn,), total, entry.dtype, axis, tied, *types)
    program.params.update(entry.fqn, storage=storage)
    program.buckets = (*program.buckets, bucket)


def _rewrite(function: GraphFunction, program: Program, policy: ZeroPolicy) -> None:
    buckets = {bucket.fqns[0]: bucket for bucket in program.buckets if bucket.axis is not None}
    if policy.gathers_in_graphs:
        _gather_parameters(function, program, policy, buckets)
    if policy.reduces_per_microbatch:
        _reduce_gradients(function, program, policy, buckets)


def _gather_parameters(
    function: GraphFunction, program: Program, policy: ZeroPolicy, buckets: dict[str, Bucket]
) -> None:
    """Let a phase read cut parameters through a gather, each right before its first use."""
    rewriter = Rewriter(function, ShardStorage.name)
    order = {node: index for index, node in enumerate(function.graph.nodes)}
    mode = rewriter.fake_mode() if function.inputs else None
    for fqn, param in function.named(PARAM).items():
        bucket = buckets.get(fqn)
        if bucket is None:
            continue
        flat = flat_placeholder(rewriter, bucket, FLAT, bucket.length // policy.size, mode)
        first = min(param.users, key=order.__getitem__)
        like = param if first.op == "output" else first
        with rewriter.before(first):
            narrow = cast(rewriter, flat, bucket.read_dtype, span=policy.span)
            args = (narrow, 0, [], policy.axis, policy.size)
            whole = rewriter.call(all_gather, *args, like=like, placements={}, span=policy.span)
            shape = list(program.params[fqn].local_shape(program.mesh))
            view = rewriter.call(view_at, whole, 0, shape, like=param, span=policy.span)
        param.replace_all_uses_with(view)
        rewriter.drop_input(Port(PARAM, fqn))


def _reduce_gradients(
    function: GraphFunction, program: Program, policy: ZeroPolicy, buckets: dict[str, Bucket]
) -> None:
    """Let a phase return each rank's part of the summed gradient, reduced where it is made."""
    rewriter = Rewriter(function, ShardStorage.name)
    results: list[tuple[Port, Node | None]] = []
    for port, grad in zip(function.outputs, function.results, strict=True):
        bucket = buckets.get(port.name) if port.kind == GRAD else None
        if bucket is None:
            results.append((port, grad))
            continue
        with rewriter.after(grad):
            args = pack_args([grad], bucket.length, reduce_dtype(program, bucket))
            packed = rewriter.call(pack, *args, like=grad, placements={}, span=policy.span)
            args = (packed, 0, [], policy.axis, policy.size)
            shard = rewriter.call(reduce_scatter, *args, like=grad, placements={}, span=policy.span)
        results.append((Port(FLAT_GRAD, bucket.name), shard))
    function.set_outputs([node for _, node in results], [port for port, _ in results])


def _report(
    stored: list[ParamSpec], program: Program, policy: ZeroPolicy, ctx: PassContext
) -> None:
    away = sum(bucket.on_host for bucket in program.buckets)
    if away:
        where = f"{away} of {len(stored)} stay in host memory on CUDA, with the optimizer's state"
        ctx.note("offload", f"{where}; on a CPU machine nothing moves")
    if policy.block.stage == 0 or policy.size == 1:
        return
    cut = [entry for entry in stored if policy.cuts(entry, program)]
    small = [entry for entry in stored if policy.persists(entry, program)]
    ctx.applied("parameters", f"{len(cut)} of {len(stored)} are stored in {policy.size} parts")
    if small:
        limit = policy.block.param_persistence_threshold
        ctx.note("parameters", f"{len(small)} below {limit} stay whole on every rank")
