"""The gathers of a phase, when what they make is alive, and the least bytes a plan can do with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from autoshard.cost.traffic import tensor_bytes
from autoshard.diagnostics import PlanError
from autoshard.dsl.resolve import Resolved
from autoshard.ir.aliases import lifetime_end
from autoshard.ir.buckets import gathers_of, kept_buckets
from autoshard.ir.graph_function import GraphFunction
from autoshard.ir.program import Program, Stage
from autoshard.ops.collectives import all_gather, all_gather_start
from autoshard.units import Size, show_bytes


@dataclass(frozen=True)
class Gather:
    """A bucket that a phase gathers, or that forward hands on to it: then it has no start.

    Places are indices of the graph's nodes. ``nbytes`` are those of the whole bucket, and of the
    rank's part where that is copied from host memory first.
    """

    bucket: str
    start: Node | None
    wait: Node  # what needs it whole: its wait, or the first reader of what is handed on
    nbytes: int
    needed_at: int
    last_read: int


def find_gathers(function: GraphFunction, program: Program) -> list[Gather]:
    """Return the split gathers of a phase and what is handed on to it, as they are needed."""
    order = {node: index for index, node in enumerate(function.graph.nodes)}
    fetched = {b.name: program.mesh.size(b.axis) for b in program.buckets if b.is_fetched}
    found = []
    for name, start in gathers_of(function).items():
        if start.target is all_gather_start:
            (wait,) = start.users
            nbytes = tensor_bytes(wait)
            nbytes += nbytes // fetched[name] if name in fetched else 0
            last = order[lifetime_end(wait, order)]
            found.append(Gather(name, start, wait, nbytes, order[wait], last))
    for name, value in kept_buckets(function).items():
        first = min(value.users, key=order.__getitem__)
        last = order[lifetime_end(value, order)]
        found.append(Gather(name, None, first, tensor_bytes(value), order[first], last))
    return sorted(found, key=lambda gather: gather.needed_at)


@dataclass(frozen=True)
class Crowd:
    """Buckets that are whole at one moment even if each is gathered where it is needed."""

    where: str
    sizes: tuple[tuple[str, int], ...]  # (bucket, bytes), the largest first

    @property
    def nbytes(self) -> int:
        """Return the bytes of all of them."""
        return sum(size for _, size in self.sizes)

    def __str__(self) -> str:
        """Return "`s0.h.0` (1.2 MiB) beside `s0.root` (96 B), `s0.wte` (2 KiB) and 3 more"."""
        largest, *others = (f"`{name}` ({show_bytes(size)})" for name, size in self.sizes)
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        return f"{largest} beside {', '.join(others[:3])}{more}" if others else largest


def crowds(program: Program, ranks: Sequence[int]) -> list[Crowd]:
    """Return the largest crowd of every phase, and of what a rank gathers once a step."""
    found = [
        _largest(find_gathers(function, program), f"stage {stage.index} {phase}")
        for stage in program.stages
        for phase, function in stage.phases.items()
        if phase not in ("U", "R")
    ]
    for rank in sorted(set(ranks)):
        stages = [stage for stage in program.stages if ranks[stage.index] == rank]
        found.append(Crowd(f"a step of pp rank {rank}", _sorted(_gathered_once(stages))))
    return [crowd for crowd in found if crowd.sizes]


def check_fits(program: Program, ranks: Sequence[int], limit: int, resolved: Resolved) -> None:
    """Raise PlanError when even without prefetch more than ``limit`` bytes are whole at once."""
    worst = max(crowds(program, ranks), key=lambda crowd: crowd.nbytes, default=None)
    if worst is None or worst.nbytes <= limit:
        return
    by_step = resolved.plan.zero.reshard_after_forward == "step"
    way = "`reshard_after_forward = on`" if by_step else "smaller `units` or `gather_bucket`"
    raise PlanError(
        f"`max_gathered = {Size(limit)}` is too small: {worst.where} needs {worst} whole",
        code="AS315",
        span=resolved.plan.span("zero.max_gathered"),
        label=f"{show_bytes(worst.nbytes)} at once",
        help=(
            f"`max_gathered = {Size(worst.nbytes)}` is the least that works",
            f"or {way}: less is gathered at once",
        ),
    )


def _largest(gathers: Sequence[Gather], where: str) -> Crowd:
    """Return the most that is whole at a moment at which one of the gathers is needed."""
    found = [Crowd(where, ())]
    for moment in (gather.needed_at for gather in gathers):
        alive = [g for g in gathers if _begin(g) <= moment <= g.last_read]
        found.append(Crowd(where, _sorted((g.bucket, g.nbytes) for g in alive)))
    return max(found, key=lambda crowd: crowd.nbytes)


def _begin(gather: Gather) -> int:
    return gather.needed_at if gather.start is not None else 0


def _gathered_once(stages: Iterable[Stage]) -> list[tuple[str, int]]:
    graphs = (stage.phases["U"] for stage in stages if "U" in stage.phases)
    gathers = [pair for graph in graphs for pair in gathers_of(graph).items()]
    return [(name, tensor_bytes(whole_bucket(node))) for name, node in gathers]


def whole_bucket(gather: Node) -> Node:
    """Return the node that holds the gathered bucket: the wait of a start."""
    if gather.target is all_gather:
        return gather
    assert gather.target is all_gather_start
    (wait,) = gather.users
    return wait


def _sorted(sizes: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(sizes, key=lambda pair: -pair[1]))
