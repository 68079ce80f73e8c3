"""Did you mean, for paths: the module whose path is most like a glob that matches nothing."""

from collections.abc import Iterable
from functools import cached_property

from autoshard.dsl.globs import Glob
from autoshard.dsl.suggest import likeness
from autoshard.model_facts import ModelFacts

GAP = 0.7  # cost of a segment that only one of the two paths has
ENOUGH = 0.5  # share of the segments that must agree for a path to be worth naming
MAX_CHILDREN = 12


class Paths:
    """Answer questions about the paths of a model, with layers that differ in a number as one."""

    def __init__(self, facts: ModelFacts) -> None:
        """Keep the model's paths."""
        self.facts = facts

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Return the module paths but the root's."""
        return tuple(module.path for module in self.facts.modules if module.path)

    @cached_property
    def params(self) -> tuple[str, ...]:
        """Return every name of every parameter."""
        return tuple(self.facts.params)

    def match(self, glob: Glob) -> tuple[str, ...]:
        """Return the modules that a glob matches; only when there are none, the parameters."""
        found = tuple(path for path in self.modules if glob.matches(path))
        return found or tuple(fqn for fqn in self.params if glob.matches(fqn))

    def suggestion(self, glob: Glob, with_weight: bool) -> tuple[str, int] | None:
        """Return the nearest glob that matches something, and how many modules it matches.

        `with_weight` looks only among the modules that have a weight of their own.
        """
        patterns = self._weighted if with_weight else self._patterns(self.modules)
        scored = [(_distance(glob.segments, p), i, p) for i, p in enumerate(patterns)]
        if not scored:
            return None
        distance, _, best = min(scored)
        if distance > ENOUGH * max(len(best), len(glob.segments)):
            return None
        near = Glob(".".join(_keep_own(glob.segments, best)))
        if not self.match(near):
            near = Glob(".".join(best))
        return near.text, len(self.match(near))

    def note(self, glob: Glob) -> str:
        """Say how far the glob matches, and what stands below that."""
        for length in range(len(glob.segments) - 1, 0, -1):
            found = self.match(glob.prefix(length))
            children = self._children(found)
            if found and children:
                number = f"{len(found)} module{'s' * (len(found) > 1)}"
                return f"`{glob.prefix(length).text}` matches {number}; below it: {children}"
        return f"{self.facts.class_name} has: {self._children(('',))}"

    def _children(self, paths: Iterable[str]) -> str:
        modules = (self.facts.by_path.get(path) for path in paths)
        names = sorted({name for module in modules if module for name in module.children})
        return shortened(names)

    @cached_property
    def _weighted(self) -> tuple[tuple[str, ...], ...]:
        return self._patterns(m.path for m in self.facts.modules if m.path and m.weight_shape)

    @staticmethod
    def _patterns(paths: Iterable[str]) -> tuple[tuple[str, ...], ...]:
        """Return the distinct paths with `*` for numbers, as segments."""
        found = (tuple("*" if s.isdecimal() else s for s in path.split(".")) for path in paths)
        return tuple(dict.fromkeys(found))


def shortened(names: list[str]) -> str:
    """Return names in one line: numbers as a range, many names cut short."""
    if len(names) > 2 and all(name.isdecimal() for name in names):
        numbers = sorted(map(int, names))
        return f"{numbers[0]} to {numbers[-1]}"
    more = [f"and {len(names) - MAX_CHILDREN} more"] if len(names) > MAX_CHILDREN else []
    return ", ".join([*names[:MAX_CHILDREN], *more])


def _distance(given: tuple[str, ...], path: tuple[str, ...]) -> float:
    """Return the least cost of turning one path into the other, segment by segment."""
    row = [j * GAP for j in range(len(path) + 1)]
    for i, segment in enumerate(given, 1):
        above, row = row, [i * GAP]
        for j, name in enumerate(path, 1):
            change = above[j - 1] + _segment_cost(segment, name)
            row.append(min(change, above[j] + GAP, row[j - 1] + GAP))
    return row[-1]


def _segment_cost(given: str, name: str) -> float:
    """Return 0 for the same segment, up to 1; `query` and `q_proj` are near by their beginning."""
    if given == name or (name == "*" and (given.isdecimal() or given[0] in "*[")):
        return 0.0
    if name == "*" or given == "*":
        return 0.9
    if Glob(given).matches(name):
        return 0.1
    same_start = 0.15 if given[0] == name[0] else 0.0
    return min(1.0, 1.0 - likeness(given, name) + 0.1) - same_start


def _keep_own(given: tuple[str, ...], best: tuple[str, ...]) -> tuple[str, ...]:
    """Return the best path with the user's own `[0..3]` or `0` where it has `*`."""
    if len(given) != len(best):
        return best
    return tuple(
        g if b == "*" and (g.isdecimal() or g[0] == "[") else b
        for g, b in zip(given, best, strict=True)
    )
