"""Pipelines of passes: text form and the check of their contracts before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.compiler.pass_base import Pass
from autoshard.compiler.registry import parse_pass
from autoshard.diagnostics import PassError


@dataclass(frozen=True)
class Pipeline:
    """An ordered sequence of passes; its text form is one pass a line and parses back."""

    passes: tuple[Pass, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.passes))

    @classmethod
    def parse(cls, text: str) -> Pipeline:
        """Return the pipeline that ``text`` spells: passes on lines, ``#`` starts a comment."""
        lines = (line.split("#", 1)[0].strip() for line in text.splitlines())
        return cls(tuple(parse_pass(line) for line in lines if line))

    def groups(self) -> tuple[str, ...]:
        """Return the names of the groups, in order of their last pass."""
        return tuple(dict.fromkeys(p.group for p in self.passes))

    def until(self, name: str) -> Pipeline:
        """Return the passes up to the last one that is called ``name`` or in group ``name``."""
        ends = [i for i, p in enumerate(self.passes) if name in (p.name, p.group)]
        if not ends:
            known = ", ".join((*self.groups(), *(p.name for p in self.passes)))
            raise PassError(f"no pass or group '{name}'", help=(f"one of: {known}",))
        return Pipeline(self.passes[: ends[-1] + 1])

    def after(self, name: str, extra: Iterable[Pass]) -> Pipeline:
        """Return the pipeline with ``extra`` right after the pass or group ``name``."""
        head = self.until(name).passes
        return Pipeline((*head, *extra, *self.passes[len(head) :]))

    def check(self, holds: Iterable[str]) -> frozenset[str]:
        """Return the invariants that hold at the end, or raise where a pass lacks one.

        ``holds`` are those of the program the pipeline starts from.
        """
        have = set(holds)
        broken: dict[str, str] = {}
        for step in self.passes:
            lacking = sorted(step.assumes - have)
            if lacking:
                raise PassError(_why(step, lacking[0], broken, self.passes))
            have = (have - step.breaks) | step.establishes
            broken |= dict.fromkeys(step.breaks - step.establishes, step.name)
        return frozenset(have)


def _why(step: Pass, lacking: str, broken: dict[str, str], passes: tuple[Pass, ...]) -> str:
    if lacking in broken:
        return f"pass '{step}' assumes '{lacking}', which '{broken[lacking]}' broke"
    makers = [p.name for p in passes if lacking in p.establishes]
    where = f"'{makers[0]}' establishes it but runs later" if makers else "no pass establishes it"
    return f"pass '{step}' assumes '{lacking}': {where}"
