"""What the plan's `zero` block means for one program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.fx import Node

from autoshard.diagnostics import PlanError
from autoshard.dsl.globs import Glob
from autoshard.dsl.resolve import Resolved
from autoshard.ir.node_info import val
from autoshard.ir.params import ParamSpec
from autoshard.ir.program import Program
from autoshard.plan import ZeroBlock
from autoshard.source import Span


@dataclass(frozen=True)
class ZeroPolicy:
    """The plan's choices, with the axis and its size looked up."""

    block: ZeroBlock
    axis: str  # over which buckets are cut
    size: int
    span: Span | None

    @classmethod
    def of(cls, resolved: Resolved) -> ZeroPolicy:
        """Read the policy from a plan; refuse a group that the mesh lacks."""
        block, mesh = resolved.plan.zero, resolved.mesh
        span = resolved.plan.span("zero.group")
        if block.group != "dp" and not mesh.members(block.group):
            raise PlanError(
                f"`group = {block.group}` names no axis of the mesh {mesh}",
                code="AS313",
                span=span,
                help="`group = dp`, or an axis of the mesh block such as `dp_shard`",
            )
        zero_span = resolved.plan.span("zero.stage") or resolved.plan.span("zero")
        return cls(block, block.group, mesh.size(block.group), zero_span)

    @property
    def gathers_in_graphs(self) -> bool:
        """Tell whether phases gather parameters, rather than U once per step."""
        return self.block.stage == 3 and self.block.reshard_after_forward != "step"

    @property
    def reduces_per_microbatch(self) -> bool:
        """Tell whether phases reduce gradients, rather than R once per step."""
        return self.block.stage == 2 or self.gathers_in_graphs

    def cuts(self, entry: ParamSpec, program: Program) -> bool:
        """Tell whether each rank stores only a part of the parameter.

        Frozen parameters have no optimizer state and no gradient, so only stage 3 cuts them.
        """
        if self.block.stage == 0 or self.size == 1:
            return False
        if self.block.stage < 3:
            return entry.requires_grad
        return not self.persists(entry, program)

    def offload(self, is_cut: bool, is_trained: bool) -> tuple[bool, bool]:
        """Return whether a bucket is stored on the host, and fetched from there by each gather.

        Optimizer state lies where the parameters lie that it belongs to.
        """
        is_fetched = self.block.offload_params == "cpu" and self.block.stage == 3 and is_cut
        return is_fetched or (self.block.offload_optimizer == "cpu" and is_trained), is_fetched

    def persists(self, entry: ParamSpec, program: Program) -> bool:
        """Tell whether stage 3 keeps the parameter whole because it is small."""
        itemsize = entry.dtype.itemsize
        threshold = self.block.param_persistence_threshold.bytes(itemsize)
        return self.block.stage == 3 and numel(entry, program) * itemsize < threshold

    def unit(self, fqn: str, globs: Sequence[Glob]) -> str:
        """Return the unit a parameter is gathered with: a module path, or "root"."""
        parts = fqn.split(".")
        paths = list(accumulate(parts[:-1], lambda head, part: f"{head}.{part}"))
        if self.block.units == "auto":
            inside = (p for p, part in zip(paths, parts, strict=False) if part.isdecimal())
        else:
            inside = (p for p in paths if any(glob.matches(p) for glob in globs))
        return next(inside, "root")

    def globs(self) -> tuple[Glob, ...]:
        """Return the globs of `units`, none for `auto`."""
        units = self.block.units
        if units == "auto":
            return ()
        return tuple(Glob(text) for text in ((units,) if isinstance(units, str) else units))


def pack_args(grads: list[Node], length: int, dtype: torch.dtype) -> tuple[object, ...]:
    """Return the arguments of `pack`; the dtype is named only where it is another."""
    is_same = all(val(grad).dtype == dtype for grad in grads)
    return (grads, length) if is_same else (grads, length, dtype)


def numel(entry: ParamSpec, program: Program) -> int:
    """Return the number of elements that one rank computes with."""
    count = 1
    for extent in entry.local_shape(program.mesh):
        count *= extent
    return count


def padded(length: int, size: int) -> int:
    """Return ``length`` rounded up to a multiple of ``size``."""
    return -(-length // size) * size
