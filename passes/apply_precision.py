"""Let layers compute in half precision, by casts that stand in the graph.

The idea and the lists of operators are autocast's (and Micikevicius et al., "Mixed precision
training", 2018: float32 master weights, loss scaling). It runs on the forward graph, where layers
are whole: the transposes of casts then come from autograd, tensor-parallel collectives and stage
boundaries carry the narrow type, and backward needs no list of its own. This pass does not choose
what is kept for backward, and does not change what the optimizer updates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from autoshard.compiler.pass_base import Numerics, Pass, PassContext
from autoshard.compiler.registry import register
from autoshard.ir.graph_function import LOSS, PARAM, GraphFunction
from autoshard.ir.node_info import info, val
from autoshard.ir.precision import FLOATS, HALVES, Precision, parse_scale
from autoshard.ir.program import Level, Program
from autoshard.ir.rewrite import Rewriter
from autoshard.passes._precision_policy import Policy, policy_of
from autoshard.plan import PrecisionBlock
from autoshard.source import Span

aten = torch.ops.aten


@register
@dataclass(frozen=True)
class ApplyPrecision(Pass):
    """Cast what operators read, as the plan's `precision` block says.

        y = linear(x, w)               -->  y = linear(to(x, bf16), w)  # w arrives in bf16
        y = layer_norm(x, [D], w)      -->  y = to(layer_norm(to(x, f32), [D], to(w, f32)), bf16)
        l = cross_entropy_loss(y, t)   -->  l = cross_entropy_loss(to(y, f32), t)

    Parameters arrive in `params`; they are stored, handed out and saved in `master`. Matrix
    products and attention compute in `compute`; losses, sums, softmax and norms in float32, the
    last two with their result in the type of their input; all others in the widest type they read.
    A program in float64 (numbers are being verified) is left alone. Bytes per parameter with Adam:
    16 with gradients summed in bf16, 18 in float32.
    """

    name: ClassVar[str] = "apply-precision"
    group: ClassVar[str] = "precision"
    level: ClassVar[Level] = Level.FORWARD
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATES

    def run(self, program: Program, ctx: PassContext) -> None:
        """Record the number types, then cast in the forward graph."""
        block = ctx.resolved.plan.precision
        if block == PrecisionBlock() or program.forward is None or program.precision is not None:
            return
        if any(entry.dtype is torch.float64 for entry in program.params):
            ctx.missed("precision", "the program is in float64: it keeps its number types")
            return
        program.precision = _read(block)
        span = ctx.resolved.plan.span("precision")
        _retype_parameters(program, program.precision)
        count = _Casts(program.forward, program.precision, self.name, span).run()
        ctx.applied("forward", f"{count} casts; layers compute in {block.compute}")
        nbytes = program.precision.bytes_per_parameter
        ctx.note("parameters", f"{nbytes} bytes each with Adam, before anything is cut")


def _read(block: PrecisionBlock) -> Precision:
    scale, is_dynamic = parse_scale(block.loss_scale)
    compute = FLOATS[block.compute or block.params]
    half = torch.float16 in (compute, FLOATS[block.params])
    return Precision(
        FLOATS[block.params],
        compute,
        FLOATS[block.grads],
        FLOATS[block.reduce],
        FLOATS[block.master],
        scale if half else None,
        is_dynamic and half,
    )


def _retype_parameters(program: Program, precision: Precision) -> None:
    """Store parameters as masters and let the graph read them in ``params``."""
    forward = program.forward
    assert forward is not None
    placeholders = forward.named(PARAM)
    for entry in list(program.params):
        if entry.is_buffer or not entry.dtype.is_floating_point:
            continue
        program.params.update(entry.fqn, dtype=precision.master, computed_in=precision.params)
        if entry.fqn in placeholders:
            node = placeholders[entry.fqn]
            with val(node).fake_mode:
                node.meta["val"] = val(node).to(precision.params)


class _Casts:
    """Walks the forward graph once and casts what each operator reads."""

    def __init__(
        self, function: GraphFunction, precision: Precision, pass_name: str, span: Span | None
    ) -> None:
        self._function, self._precision, self._span = function, precision, span
        self._rewriter = Rewriter(function, pass_name)
        self._count = 0

    def run(self) -> int:
        """Return the number of casts made."""
        for node in list(self._function.graph.nodes):
            if node.op == "call_function":
                self._treat(node)
        results = [
            self._cast_after(node, torch.float32) if port.kind == LOSS and node else node
            for port, node in zip(self._function.outputs, self._function.results, strict=True)
        ]
        self._function.set_outputs(results, self._function.outputs)
        return self._count

    def _treat(self, node: Node) -> None:
        policy, read = policy_of(node), _floats(node.all_input_nodes)
        before = _type_read_first(node)
        if policy is Policy.COMPUTE:
            self._cast(node, read, self._precision.compute)
        elif policy in (Policy.WIDE, Policy.WIDE_INSIDE):
            self._cast(node, [n for n in read if val(n).dtype in HALVES], torch.float32)
        elif policy is Policy.ALIKE:
            self._align(node, read)
        self._refake(node, read)
        if policy is Policy.WIDE_INSIDE and before in HALVES:
            self._cast_after(node, before)

    def _refake(self, node: Node, read: list[Node]) -> None:
        """Take the new type of the result; an operator that wants one type gets the widest."""
        try:
            self._rewriter.refake(node)
        except RuntimeError:
            if len({val(n).dtype for n in read}) < 2:
                raise
            self._cast(node, read, _widest(read))
            self._rewriter.refake(node)

    def _align(self, node: Node, read: list[Node]) -> None:
        """Give a fused norm one type for its summands; its weights may be that or float32."""
        full = [n for n in read if val(n).shape == val(read[0]).shape]
        wide = _widest(full)
        rest = [n for n in read if n not in full and val(n).dtype not in (wide, torch.float32)]
        self._cast(node, [*full, *rest], wide)

    def _cast(self, node: Node, read: Iterable[Node], dtype: torch.dtype) -> None:
        """Let ``node`` read the given inputs in ``dtype``."""
        casts = {}
        for source in read:
            if val(source).dtype != dtype:
                with self._rewriter.before(node):
                    casts[source] = self._call(source, dtype, like=node)
        node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda arg: casts.get(arg, arg))

    def _cast_after(self, node: Node, dtype: torch.dtype) -> Node:
        """Let all readers of ``node`` read it in ``dtype``."""
        if not isinstance(val(node), torch.Tensor) or val(node).dtype == dtype:
            return node
        readers = list(node.users)
        with self._rewriter.after(node):
            cast = self._call(node, dtype, like=node)
        for reader in readers:
            reader.replace_input_with(node, cast)
        return cast

    def _call(self, source: Node, dtype: torch.dtype, like: Node) -> Node:
        self._count += 1
        return self._rewriter.call(
            aten._to_copy.default,
            source,
            like=like,
            placements=info(source).placements,
            span=self._span,
            role="cast",
            dtype=dtype,
        )


def _floats(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes that are floating-point tensors."""
    return [n for n in nodes if isinstance(val(n), torch.Tensor) and val(n).dtype.is_floating_point]


def _type_read_first(node: Node) -> torch.dtype | None:
    read = _floats(node.all_input_nodes)
    return val(read[0]).dtype if read else None


def _widest(nodes: Iterable[Node]) -> torch.dtype:
    dtypes = [val(n).dtype for n in nodes]
    wide = dtypes[0]
    for dtype in dtypes[1:]:
        wide = torch.promote_types(wide, dtype)
    return wide
