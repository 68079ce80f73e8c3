"""Which forward operations run again: by rules of the plan, or chosen to fit a budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.fx import Node

from autoshard.dsl.resolve import Resolved
from autoshard.ir.aliases import cheap_base, is_cheap
from autoshard.ir.graph_function import GraphFunction
from autoshard.ir.node_info import info, val
from autoshard.passes._schedules import compute_schedule
from autoshard.plan import Size
from autoshard.schedule import Kind
from autoshard.units import show_bytes

RECOMPUTED = "recomputed"  # the role of an operation that runs again
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
SAVABLE = ("attention", "matmul")


@dataclass(frozen=True)
class Rule:
    """What to do with one module: run it again but for the results named in ``save``."""

    again: bool = True
    save: tuple[str, ...] = ()


Rules = Mapping[str, Rule]


def rules_of(joint: GraphFunction, resolved: Resolved) -> dict[str, Rule]:
    """Return module path -> rule: the plan's, or every repeated block where only a budget is."""
    rules = {}
    for path, found in resolved.recompute.items():
        save = tuple(found.options.get("save") or SAVABLE) if found.style == "selective" else ()
        rules[path] = Rule(found.style != "none", save)
    if rules:
        return rules
    paths = (block for node in joint.graph.nodes for block in _blocks(info(node).path))
    return {path: Rule() for path in dict.fromkeys(paths)}


def flight(resolved: Resolved, stage: int) -> int:
    """Return the largest number of micro-batches whose activations a stage holds at once."""
    schedule = compute_schedule(resolved)
    held = peak = 0
    for action in schedule.ranks[schedule.stage_to_rank[stage]]:
        if action.stage == stage:
            held += (action.kind is Kind.F) - (action.kind in (Kind.W, Kind.B))
            peak = max(peak, held)
    return max(peak, 1)


class Regions:
    """The forward operations of one joint graph by the rule that governs them."""

    def __init__(self, joint: GraphFunction, rules: Rules) -> None:
        """Look up the innermost rule of every forward operation."""
        self.rules = rules
        self._nodes = [n for n in joint.graph.nodes if n.op == "call_function"]
        self._results = {node for node in joint.results if node is not None}
        self.region: dict[Node, str] = {}
        for node in self._nodes:
            if info(node).phase == "F":
                path = self._rule(info(node).path)
                if path is not None and rules[path].again:
                    self.region[node] = path
        self._needed: dict[str, list[Node]] = {path: [] for path in rules}  # by backward
        for node in self._nodes:
            path = self.region.get(cheap_base(node))
            if path is not None and info(node).phase == "F" and _has_backward_user(node):
                self._needed[path].append(node)

    def plan(self) -> dict[str, frozenset[Node]]:
        """Return rule path -> the operations that run again, views of theirs included.

        What one module that runs again reads of another is kept: it is that one's input.
        """
        kept = {node for node in self.region if self._is_saved(node)}
        while True:
            plan = {path: self._again(path, kept) for path in self.rules}
            inputs = {n for again in plan.values() for n in _inputs(again)}
            more = {n for n in inputs if n in self.region} - kept
            if not more:
                return {path: frozenset(again) for path, again in plan.items() if again}
            kept |= more

    def kept_bytes(self) -> int:
        """Return the bytes that forward keeps for backward as the graph now stands."""
        return _bytes(set(self._read_by_backward()))

    def _read_by_backward(self) -> Iterator[Node]:
        for node in self._nodes:
            if info(node).phase == "F" and _has_backward_user(node):
                yield cheap_base(node)

    def _again(self, path: str, kept: set[Node]) -> set[Node]:
        """Return what must run again for backward to read nothing of a module but its inputs."""

        def is_dropped(node: Node) -> bool:
            base = cheap_base(node)
            return self.region.get(base) == path and base not in kept

        wanted = [n for n in self._needed[path] if is_dropped(n)]
        again: set[Node] = set()
        while wanted:
            node = wanted.pop()
            if node not in again:
                again.add(node)
                wanted += [arg for arg in node.all_input_nodes if is_dropped(arg)]
        return again

    def _rule(self, path: str) -> str | None:
        """Return the innermost module with a rule that holds ``path``."""
        inside = [path, *reversed(list(_parents(path)))]
        return next((p for p in inside if p in self.rules), None)

    def _is_saved(self, node: Node) -> bool:
        save = self.rules[self.region[node]].save
        parent = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        is_part = parent is not None and not isinstance(val(parent), torch.Tensor)
        name = _name(parent if is_part and parent is not None else node)
        is_attention = "attention" in name or _mixes_softmax(node)
        return ("attention" in save and is_attention) or ("matmul" in save and name in PRODUCTS)


@dataclass(frozen=True)
class Choice:
    """What a budget led to."""

    rules: Rules
    budget: int
    before: int  # bytes kept by all micro-batches in flight when nothing runs again
    after: int
    of: int  # candidates

    def summary(self) -> str:
        """Return the choice in a sentence, for a remark."""
        names = ", ".join(self.rules) or "nothing"
        fits = "fits" if self.after <= self.budget else "does not fit"
        return (
            f"budget {show_bytes(self.budget)} for activations, {show_bytes(self.before)} if all "
            f"were kept: {len(self.rules)} of {self.of} run again ({names}), which leaves "
            f"{show_bytes(self.after)} and {fits}"
        )


def choose(regions: Regions, budget: Size | float, in_flight: int) -> Choice:
    """Return the modules to run again so that what all micro-batches keep fits the budget.

    Modules go in order of operations per byte saved, equal ones in the model's order; bytes are
    those that backward alone reads of a module, less what the module reads.
    """
    before = regions.kept_bytes() * in_flight
    limit = int(budget * before) if isinstance(budget, float) else budget.bytes(1)
    offers = []
    for place, (path, again) in enumerate(regions.plan().items()):
        saved = _bytes({cheap_base(n) for n in again if _has_backward_user(n)})
        saved -= _bytes({n for n in _inputs(again) if not _has_backward_user(n)})
        if saved > 0:
            offers.append((_work(again) / saved, place, path, saved * in_flight))
    after, rules = before, {}
    for _, _, path, saved in sorted(offers):
        if after <= limit:
            break
        rules[path] = regions.rules[path]
        after -= saved
    return Choice(rules, limit, before, after, len(offers))


def _inputs(again: set[Node] | frozenset[Node]) -> set[Node]:
    """Return what the operations read of others, views looked through; inputs of the graph not."""
    read = {cheap_base(arg) for node in again for arg in node.all_input_nodes if arg not in again}
    return {node for node in read if node.op == "call_function"}


def _has_backward_user(node: Node) -> bool:
    return any(info(user).phase == "B" for user in node.users)


def _parents(path: str) -> Iterator[str]:
    parts = path.split(".")
    return accumulate(parts[:-1], lambda head, part: f"{head}.{part}")


def _blocks(path: str) -> Iterator[str]:
    """Yield the outermost numbered module of a path, if it lies in one."""
    inside = [p for p in (*_parents(path), path) if p.rpartition(".")[2].isdecimal()]
    yield from inside[:1]


def _mixes_softmax(node: Node) -> bool:
    """Tell whether a product's first factor is a softmax: attention that is spelled out."""
    if _name(node) not in PRODUCTS:
        return False
    factor = node.args[0]
    while is_cheap(factor) or _name(factor) in ("dropout", "_to_copy", "clone"):
        factor = factor.args[0]
    return "softmax" in _name(factor)


def _name(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[-1] if schema else ""


def _bytes(nodes: set[Node]) -> int:
    values = [val(n) for n in nodes if n.op == "call_function"]
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))


def _work(again: set[Node] | frozenset[Node]) -> float:
    """Return floating-point operations: of products by their sizes, of all else one an element."""
    total = 0.0
    for node in again:
        if is_cheap(node) or not isinstance(val(node), torch.Tensor):
            continue
        size = math.prod(val(node).shape)
        if _name(node) in PRODUCTS:
            size *= 2 * val(node.args[-2]).shape[-1]
        total += size
    return total
