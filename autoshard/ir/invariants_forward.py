"""The invariants of every graph, and those of the forward graph before it is cut in stages."""

from __future__ import annotations

from autoshard.diagnostics import PassError, PlacementError
from autoshard.ir.decide import Axis
from autoshard.ir.graph_function import LOSS, PARAM, GraphFunction
from autoshard.ir.infer import Inference
from autoshard.ir.node_info import info, val
from autoshard.ir.params import ParamSpec
from autoshard.ir.placement import Partial, Shard, divides
from autoshard.ir.program import Program
from autoshard.ir.sources import source_placement
from autoshard.ops.collectives import all_gather, reduce_scatter, shard

_RESHAPING = (all_gather, reduce_scatter, shard)


def check_well_formed(program: Program) -> None:
    """Check that every graph is in order and every value has a shape and a dtype."""
    for name, function in program.functions():
        try:
            function.graph.lint()
        except RuntimeError as error:
            raise PassError(f"graph '{name}' is not well formed: {error}") from error
        _check_ports(name, function)
        for node in function.graph.nodes:
            if node.op not in ("placeholder", "call_function", "output"):
                raise PassError(f"'%{node}' in '{name}' is a '{node.op}', not a call")
            if node.op == "call_function" and "val" not in node.meta:
                raise PassError(f"'%{node}' in '{name}' ({node.target}) has no shape")


def check_sourced(program: Program) -> None:
    """Check that every call says where it comes from: a user line, a module, or a pass."""
    for name, function in program.functions():
        for node in function.graph.find_nodes(op="placeholder"):
            if "val" not in node.meta:
                raise PassError(f"input '%{node}' of '{name}' has no shape")
        for node in function.graph.nodes:
            record = info(node)
            known = record.source or record.path or record.span or record.passes
            if node.op == "call_function" and not known:
                raise PassError(f"'%{node}' in '{name}' ({node.target}) has no origin")


def check_global_loss(program: Program) -> None:
    """Check that the loss is a sum over data parallel ranks and micro-batches."""
    if program.forward is None or program.mesh.size("dp") * program.num_microbatches == 1:
        return
    for node in program.forward.named_results(LOSS).values():
        placement = info(node).placement("dp")
        if not isinstance(placement, Partial):
            source = info(node).source
            raise PassError(
                f"the loss ('%{node}', {source}) is {placement} over dp, must be P(sum)"
            )


def check_params_placed(program: Program) -> None:
    """Check that every parameter's split dimension divides over its axis, padding included."""
    for spec in program.params:
        for axis, placement in spec.placements.items():
            if isinstance(placement, Shard):
                _check_divides(program, spec, axis, placement)


def check_placed(program: Program) -> None:
    """Check that each value of the forward graph lies as the rules infer, nothing converted."""
    size = program.mesh.size("tp")
    if program.forward is None or size == 1:
        return
    axis = Axis("tp", size, size if is_localized(program, axis="tp") else 1)
    run = Inference(program, axis)
    function = program.forward
    for port, node in zip(function.inputs, function.placeholders, strict=True):
        run.env[node] = source_placement(program, axis, port, {}, {}, {})
    run.walk(function)
    if run.wrong:
        raise PlacementError("\n".join(run.wrong[:5]))
    loss = function.result(LOSS)
    if loss is not None and isinstance(run.env[loss], Partial):
        raise PlacementError(f"the loss ({info(loss).source}) is a partial sum over tp")


def is_localized(program: Program, axis: str) -> bool:
    """Tell whether the forward graph has its local shapes over ``axis`` already.

    A parameter that is split shows it. Where all are whole, as under sequence parallelism alone, a
    collective does: it changes the shape of a value only in a graph of local shapes.
    """
    for fqn, node in program.forward.named(PARAM).items():
        spec = program.params[fqn]
        if spec.is_sharded(axis):
            return tuple(val(node).shape) == spec.local_shape(program.mesh)
    for node in program.forward.graph.nodes:
        if node.target in _RESHAPING and axis in node.args:
            return val(node).shape != val(node.args[0]).shape
    return False


def _check_ports(name: str, function: GraphFunction) -> None:
    for what, ports, nodes in (
        ("inputs", function.inputs, function.placeholders),
        ("outputs", function.outputs, function.results),
    ):
        if len(ports) != len(nodes):
            raise PassError(f"'{name}' has {len(nodes)} {what} but {len(ports)} ports")


def _check_divides(program: Program, spec: ParamSpec, axis: str, shard: Shard) -> None:
    size = program.mesh.size(axis)
    if shard.dim >= len(spec.whole_shape):
        raise PlacementError(f"'{spec.fqn}' {list(spec.shape)} has no dimension {shard.dim}")
    if not divides(shard, spec.whole_shape, size):
        raise PlacementError(
            f"'{spec.fqn}' {list(spec.whole_shape)} can't be split as {shard} over {axis} = {size}"
        )
