"""Where the plan cuts the model: `even`, `before` and `auto` as positions in the graph.

A cut is the position of the first node of a module: what runs before it belongs to earlier stages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch.fx import Node

from autoshard.diagnostics import PlanError
from autoshard.dsl.globs import Glob
from autoshard.dsl.suggest import did_you_mean
from autoshard.ir.flops import node_flops
from autoshard.ir.graph_function import PARAM, GraphFunction
from autoshard.ir.node_info import info
from autoshard.plan import Call
from autoshard.source import Span


@dataclass(frozen=True)
class Cut:
    """The start of a later stage: the position of its first node and the module it is in."""

    position: int
    path: str


def find_cuts(
    function: GraphFunction, split: Call, count: int, span: Span | None
) -> tuple[Cut, ...]:
    """Return the ``count - 1`` cuts that ``split`` makes, in graph order; raise PlanError."""
    if count == 1:
        return ()
    starts = module_starts(function)
    if split.name == "before":
        return _before(split, starts, count, span)
    if split.name == "even":
        return _even(split, starts, count, span)
    return _auto(function, split, starts, count, span)


def module_starts(function: GraphFunction) -> dict[str, int]:
    """Return the position of the first node of every module that computes, in graph order."""
    starts: dict[str, int] = {}
    for position, node in enumerate(function.graph.nodes):
        if node.op != "call_function":
            continue
        parts = info(node).path.split(".")
        for path in accumulate(parts, lambda head, part: f"{head}.{part}"):
            starts.setdefault(path, position)
    starts.pop("", None)
    return starts


def _before(
    split: Call, starts: Mapping[str, int], count: int, span: Span | None
) -> tuple[Cut, ...]:
    unknown = [path for path in split.args if path not in starts]
    if unknown:
        raise PlanError(
            f"no module `{unknown[0]}` computes anything in this model",
            code="AS314",
            span=span,
            label="a stage can't begin there",
            help=did_you_mean(unknown[0], starts),
        )
    cuts = sorted((Cut(starts[path], path) for path in split.args), key=lambda cut: cut.position)
    for first, second in pairwise(cuts):
        if first.position == second.position:
            raise PlanError(
                f"`{first.path}` and `{second.path}` begin with the same operation",
                code="AS308",
                span=span,
                help="name the first module of each later stage once",
            )
    if len(cuts) != count - 1:
        cut = "1 cut makes" if len(cuts) == 1 else f"{len(cuts)} cuts make"
        raise PlanError(
            f"{cut} {len(cuts) + 1} stages, but the plan has {count}",
            code="AS307",
            span=span,
            label=f"needs {count - 1} cuts",
            help="`split = even(...)` or `split = auto(by=flops)` finds the cuts",
        )
    return tuple(cuts)


def _even(split: Call, starts: Mapping[str, int], count: int, span: Span | None) -> tuple[Cut, ...]:
    units = _units(split.args, starts, span)
    if len(units) < count:
        raise PlanError(
            f"{len(units)} units can't fill {count} stages",
            code="AS308",
            span=span,
            label=", ".join(unit.path for unit in units[:4]) + (" ..." if len(units) > 4 else ""),
            help="name more modules: `even(embedding, blocks.*, head)`, or use fewer stages",
        )
    # The last stage also has what follows the units, so earlier stages take what is left over.
    size, extra = divmod(len(units), count)
    sizes = [size + (stage < extra) for stage in range(count)]
    return tuple(units[end] for end in accumulate(sizes[:-1]))


def _units(globs: Sequence[str], starts: Mapping[str, int], span: Span | None) -> tuple[Cut, ...]:
    """Return the modules that the globs name, in graph order; inside another unit is no unit."""
    paths: set[str] = set()
    for text in globs:
        found = {path for path in starts if Glob(text).matches(path)}
        if not found:
            raise PlanError(
                f"`{text}` names no module that computes anything in this model",
                code="AS314",
                span=span,
                help=did_you_mean(text, starts),
            )
        paths |= found
    outer = [path for path in paths if not any(path.startswith(f"{p}.") for p in paths)]
    by_position = {starts[path]: Cut(starts[path], path) for path in sorted(outer, reverse=True)}
    return tuple(by_position[position] for position in sorted(by_position))


def _auto(
    function: GraphFunction, split: Call, starts: Mapping[str, int], count: int, span: Span | None
) -> tuple[Cut, ...]:
    cuts = _candidates(starts, count)
    if len(cuts) < count - 1:
        raise PlanError(
            f"the model has {len(cuts) + 1} modules in a row, too few for {count} stages",
            code="AS308",
            span=span,
            help="use fewer stages",
        )
    weights = _params if split.options.get("by") == "params" else _flops
    return balance(cuts, _between(function, cuts, weights(function)), count)


def _candidates(starts: Mapping[str, int], count: int) -> tuple[Cut, ...]:
    """Return where stages may begin: at repeated blocks and modules beside them, else anywhere."""
    blocks = {block_of(path) for path in starts} - {None}
    outside = [
        path
        for path in starts
        if block_of(path) is None and not any(b.startswith(f"{path}.") for b in blocks)
    ]
    for paths in ([p for p in starts if p in blocks or p in outside], list(starts)):
        by_position = {starts[path]: Cut(starts[path], path) for path in reversed(paths)}
        first = min(by_position, default=0)
        cuts = tuple(by_position[p] for p in sorted(by_position) if p > first)
        if len(cuts) >= count - 1:
            break
    return cuts


def block_of(path: str) -> str | None:
    """Return the outermost repeated block that ``path`` is in: `h.3.mlp` -> `h.3`."""
    parts = path.split(".")
    index = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return None if index is None else ".".join(parts[: index + 1])


def _between(
    function: GraphFunction, cuts: Sequence[Cut], weights: Mapping[Node, int]
) -> list[int]:
    """Return the weight before the first cut, between each two, and after the last."""
    bounds = [cut.position for cut in cuts]
    pieces = [0] * (len(bounds) + 1)
    for position, node in enumerate(function.graph.nodes):
        pieces[bisect_right(bounds, position)] += weights.get(node, 0)
    return pieces


def _flops(function: GraphFunction) -> dict[Node, int]:
    """Return the flops of each call: head and loss count, a lookup in an embedding is none."""
    return {node: node_flops(node) for node in function.graph.nodes if node.op == "call_function"}


def _params(function: GraphFunction) -> dict[Node, int]:
    """Return the elements of the parameters that each call is the first to read."""
    order = {node: place for place, node in enumerate(function.graph.nodes)}
    found: dict[Node, int] = {}
    for parameter in function.named(PARAM).values():
        first = min(parameter.users, key=order.__getitem__)
        found[first] = found.get(first, 0) + parameter.meta["val"].numel()
    return found


def balance(cuts: Sequence[Cut], weights: Sequence[int], count: int) -> tuple[Cut, ...]:
    """Choose ``count - 1`` cuts so that the heaviest stage is lightest, then the most even.

    ``weights[i]`` lies before ``cuts[i]``; the last entry after the last cut. O(count * cuts^2).
    """
    totals = [0, *accumulate(weights)]
    limit = _best(totals, count, lambda so_far, piece: max(so_far, piece))[0]

    def squares(so_far: float, piece: int) -> float:
        return so_far + piece * piece if piece <= limit else float("inf")

    chosen = _best(totals, count, squares)[1]
    return tuple(cuts[end - 1] for end in chosen)


def _best(
    totals: Sequence[int], count: int, cost: Callable[[float, int], float]
) -> tuple[float, tuple[int, ...]]:
    """Return the least cost of dividing the pieces into ``count`` runs, and where runs end."""
    pieces = len(totals) - 1
    table: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}  # end of a run -> cost, ends
    for _ in range(count):
        table = {
            end: min(
                (cost(table[start][0], totals[end] - totals[start]), (*table[start][1], end))
                for start in table
                if start < end
            )
            for end in range(min(table) + 1, pieces + 1)
        }
    best, ends = table[pieces]
    return best, ends[:-1]
