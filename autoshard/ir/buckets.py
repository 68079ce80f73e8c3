"""Flat buckets in graphs: the graphs U and R of a stage, and where a phase gathers its buckets.

A bucket holds parameters one after the other. U gathers the shards of buckets that the phases read
as whole parameters; R reduces the gradients that the phases leave unreduced. A bucket tied over
stages of one rank is gathered by the first and reduced by the last of the rank's tied stages.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from autoshard.ir.fakes import fake_vector
from autoshard.ir.graph_function import (
    ACCUMULATED,
    FLAT,
    FLAT_GRAD,
    FULL,
    FULL_GRAD,
    GRAD,
    PARAM,
    SAVED,
    GraphFunction,
    Port,
)
from autoshard.ir.node_info import NodeInfo, info
from autoshard.ir.params import ParamSpec
from autoshard.ir.placement import PARTIAL, Shard
from autoshard.ir.program import Bucket, Program, Stage
from autoshard.ir.rewrite import Rewriter
from autoshard.ops.collectives import (
    all_gather,
    all_gather_start,
    all_reduce,
    reduce_scatter,
    tied_all_reduce,
)

aten = torch.ops.aten
COMPUTE_PHASES = ("F", "I", "W")
_HANDED_ON = "gathered:"


def kept_port(bucket: str) -> Port:
    """Return the port by which forward hands a gathered bucket on to backward."""
    return Port(SAVED, _HANDED_ON + bucket)


def is_kept(port: Port) -> bool:
    """Tell whether a port hands on a gathered bucket."""
    return port.kind == SAVED and port.name.startswith(_HANDED_ON)


def buckets_of(program: Program, stage: Stage) -> tuple[Bucket, ...]:
    """Return the buckets that the ranks of ``stage`` store, tied ones of other owners too."""
    index = stage.index
    return tuple(b for b in program.buckets if index in (b.tied_stages or (b.stage,)))


def kept_buckets(function: GraphFunction) -> dict[str, Node]:
    """Return bucket name -> the whole bucket that forward handed on to a phase."""
    saved = function.named(SAVED).items()
    return {n.removeprefix(_HANDED_ON): v for n, v in saved if n.startswith(_HANDED_ON)}


def unreached_parameters(program: Program) -> frozenset[str]:
    """Return the trainable parameters that the loss does not depend on: they get no gradient.

    Their place in a bucket's gradient holds zeros, which is not the same to an optimizer.
    """
    joints = [stage.joint for stage in program.stages]
    if None in joints:
        return frozenset()
    reached = {port.name for joint in joints for port in joint.outputs if port.kind == GRAD}
    return frozenset(s.fqn for s in program.params.trainable()) - reached


def gathers_of(function: GraphFunction) -> dict[str, Node]:
    """Return bucket name -> the node that gathers it (or starts to), in graph order."""
    flats = {node: name for name, node in function.named(FLAT).items()}
    return {
        flats[uncast(node.args[0])]: node
        for node in function.graph.nodes
        if node.target in (all_gather, all_gather_start) and uncast(node.args[0]) in flats
    }


def uncast(node: Node) -> Node:
    """Return what a cast reads; any other node itself."""
    return node.args[0] if node.target is aten._to_copy.default else node


def cast(rewriter: Rewriter, node: Node, dtype: torch.dtype, **like: object) -> Node:
    """Return ``node`` in ``dtype``: itself, or a new cast of it."""
    if node.meta["val"].dtype == dtype:
        return node
    options = {"like": node, "role": "cast", "placements": info(node).placements, **like}
    return rewriter.call(aten._to_copy.default, node, dtype=dtype, **options)


def has_replicas(program: Program, bucket: Bucket) -> bool:
    """Tell whether other ranks store the same part of the bucket: their gradients are summed."""
    return bucket.replicas is not None and program.mesh.size(bucket.replicas) > 1


def reduce_dtype(program: Program, bucket: Bucket) -> torch.dtype:
    """Return the dtype in which the bucket's gradient goes between ranks."""
    return bucket.dtype if program.precision is None else program.precision.reduce


def number_types(
    program: Program, entry: ParamSpec
) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return (computed_in, summed_in) of a bucket that holds ``entry``."""
    summed = None if program.precision is None else program.precision.grads
    return entry.computed_in, summed


def flat_placeholder(
    rewriter: Rewriter,
    bucket: Bucket,
    kind: str,
    length: int,
    mode: torch._subclasses.FakeTensorMode,
) -> Node:
    """Append the input port of a bucket: its shard (FLAT, FLAT_GRAD) or its whole gradient."""
    dtype = bucket.flat_dtype if kind == FLAT else bucket.grad_dtype
    value = fake_vector(length, dtype, mode)
    placements = {}
    if bucket.axis is not None:
        placements = {bucket.axis: PARTIAL if kind == ACCUMULATED else Shard(0)}
    record = NodeInfo(path=_path(bucket), placements=placements)
    return rewriter.placeholder(Port(kind, bucket.name), value, record)


def build_storage_graphs(
    program: Program,
    pass_name: str,
    ranks: Mapping[int, int] | tuple[int, ...],
) -> None:
    """Build U and R of every stage anew from its phases and the program's buckets.

    ``ranks[stage]`` is the pipeline coordinate that holds a stage.
    """
    for stage in program.stages:
        builder = _Builder(program, stage, pass_name, ranks)
        for name, function in (("U", builder.unshard()), ("R", builder.reduce())):
            stage.phases.pop(name, None)
            if function.outputs:
                stage.phases[name] = function


class _Builder:
    """Builds U and R of one stage."""

    def __init__(
        self,
        program: Program,
        stage: Stage,
        pass_name: str,
        ranks: Mapping[int, int] | tuple[int, ...],
    ) -> None:
        self._program, self._stage, self._pass = program, stage, pass_name
        self._ranks = ranks
        phases = [stage.phases[p] for p in COMPUTE_PHASES if p in stage.phases]
        self._read = {port for function in phases for port in function.inputs}
        self._made = _outputs(stage)
        self._mode = Rewriter(stage.phases["F"], pass_name).fake_mode()

    def unshard(self) -> GraphFunction:
        """Return U: what the phases read whole, gathered where it is cut, cast from masters."""
        rewriter = Rewriter(_empty(), self._pass)
        results = []
        for bucket in buckets_of(self._program, self._stage):
            is_stored_so = bucket.axis is None and bucket.read_dtype == bucket.dtype
            if is_stored_so or not self._reads_whole(bucket) or not self._is_first(bucket):
                continue
            size = self._program.mesh.size(bucket.axis) if bucket.axis else 1
            flat = self._input(rewriter, bucket, FLAT, bucket.length // size)
            flat = _cast_last(rewriter, flat, bucket.read_dtype)
            if bucket.axis is not None:
                flat = _append(rewriter, all_gather, flat, 0, [], bucket.axis, size)
            results.append((Port(FULL, bucket.name), flat))
        return _finish(rewriter, results)

    def reduce(self) -> GraphFunction:
        """Return R: what is left to do to the gradients after the last microbatch."""
        rewriter = Rewriter(_empty(), self._pass)
        reduced: list[tuple[Bucket, Port, Node]] = []
        for bucket in self._to_reduce():
            if not self._has_gradient(bucket):
                continue
            if self._is_reduced(bucket):
                reduced += self._take_shard(rewriter, bucket)
            else:
                reduced += self._reduce_whole(rewriter, bucket)
        # After all of them have begun: what follows waits for its bucket.
        results = [(port, self._across(rewriter, b, node)) for b, port, node in reduced]
        return _finish(rewriter, results)

    def _take_shard(self, rewriter: Rewriter, bucket: Bucket) -> list[tuple[Bucket, Port, Node]]:
        """Take a shard that each microbatch reduced, if it is to be summed any further."""
        if len(self._members(bucket)) == 1 and not has_replicas(self._program, bucket):
            return []
        length = bucket.length // self._program.mesh.size(bucket.axis)
        shard = self._input(rewriter, bucket, FLAT_GRAD, length)
        shard = _cast_last(rewriter, shard, reduce_dtype(self._program, bucket))
        return [(bucket, Port(FLAT_GRAD, bucket.name), shard)]

    def _reduce_whole(self, rewriter: Rewriter, bucket: Bucket) -> list[tuple[Bucket, Port, Node]]:
        """Reduce the sum over microbatches of a whole bucket's gradients."""
        is_alone = bucket.axis is None and not has_replicas(self._program, bucket)
        if is_alone and len(self._members(bucket)) == 1:
            return []
        grad = self._input(rewriter, bucket, ACCUMULATED, bucket.length)
        grad = _cast_last(rewriter, grad, reduce_dtype(self._program, bucket))
        if bucket.axis is not None:
            cut = self._program.mesh.size(bucket.axis)
            shard = _append(rewriter, reduce_scatter, grad, 0, [], bucket.axis, cut)
            return [(bucket, Port(FLAT_GRAD, bucket.name), shard)]
        if not is_alone:
            grad = _append(rewriter, all_reduce, grad, "dp")
        return [(bucket, Port(FULL_GRAD, bucket.name), grad)]

    def _across(self, rewriter: Rewriter, bucket: Bucket, grad: Node) -> Node:
        """Sum a reduced gradient over replicas of its shard and over the stages it is tied by."""
        if bucket.axis is not None and has_replicas(self._program, bucket):
            grad = _append(rewriter, all_reduce, grad, bucket.replicas)
        return self._over_stages(rewriter, bucket, grad)

    def _over_stages(self, rewriter: Rewriter, bucket: Bucket, grad: Node) -> Node:
        members = self._members(bucket)
        if len(members) == 1:
            return grad
        return _append(rewriter, tied_all_reduce, grad, "pp", members)

    def _to_reduce(self) -> list[Bucket]:
        """Return the stage's own buckets; its rank's last tied stage has all that are tied.

        So a rank sums tied gradients in one place, after all its uses and in one order on all
        ranks: no two of them can wait for each other's tied parameters.
        """
        rank = self._ranks[self._stage.index]
        tied = [b for b in self._program.buckets if b.tied_stages and rank in self._members(b)]
        last = max((s for b in tied for s in b.tied_stages if self._ranks[s] == rank), default=None)
        own = [b for b in buckets_of(self._program, self._stage) if not b.tied_stages]
        return own + tied if last == self._stage.index else own

    def _members(self, bucket: Bucket) -> list[int]:
        """Return the pipeline coordinates that store the bucket."""
        return sorted({self._ranks[stage] for stage in bucket.tied_stages or (bucket.stage,)})

    def _is_first(self, bucket: Bucket) -> bool:
        """Tell whether no earlier stage on this rank shares the bucket: it would gather it."""
        rank = self._ranks[self._stage.index]
        homes = bucket.tied_stages or (bucket.stage,)
        return self._stage.index == min(s for s in homes if self._ranks[s] == rank)

    def _input(self, rewriter: Rewriter, bucket: Bucket, kind: str, length: int) -> Node:
        return flat_placeholder(rewriter, bucket, kind, length, self._mode)

    def _reads_whole(self, bucket: Bucket) -> bool:
        return any(Port(PARAM, name) in self._read for name in bucket.fqns)

    def _has_gradient(self, bucket: Bucket) -> bool:
        """Tell whether any stage that shares the bucket makes a gradient of it."""
        ports = {Port(FLAT_GRAD, bucket.name), *(Port(GRAD, name) for name in bucket.fqns)}
        return not ports.isdisjoint(self._made_by_homes(bucket))

    def _is_reduced(self, bucket: Bucket) -> bool:
        """Tell whether the phases reduce the bucket's gradient, in this stage or another home."""
        return Port(FLAT_GRAD, bucket.name) in self._made_by_homes(bucket)

    def _made_by_homes(self, bucket: Bucket) -> set[Port]:
        homes = (self._program.stages[index] for index in bucket.tied_stages)
        return self._made.union(*(_outputs(stage) for stage in homes))


def _outputs(stage: Stage) -> set[Port]:
    phases = (stage.phases[p] for p in COMPUTE_PHASES if p in stage.phases)
    return {port for function in phases for port in function.outputs}


def _empty() -> GraphFunction:
    graph = Graph()
    graph.output(())
    return GraphFunction(graph, (), ())


def _append(rewriter: Rewriter, op: object, value: Node, *args: object) -> Node:
    with rewriter.before(rewriter.function.output_node):
        return rewriter.call(op, value, *args, like=value, placements={})


def _cast_last(rewriter: Rewriter, value: Node, dtype: torch.dtype) -> Node:
    with rewriter.before(rewriter.function.output_node):
        return cast(rewriter, value, dtype)


def _finish(rewriter: Rewriter, results: list[tuple[Port, Node]]) -> GraphFunction:
    function = rewriter.function
    function.set_outputs([node for _, node in results], [port for port, _ in results])
    return function


def _path(bucket: Bucket) -> str:
    return bucket.fqns[0].rpartition(".")[0]
