"""The life of one name - a parameter, a module, a value - through the passes.

    globalize-loss
      forward   blocks.1.mlp.up: f32[4, 64, 256] = linear(blocks.1.mlp_norm, ...)  # model.py:61
    shard-params
      parameter  f32[256, 64], tp: S(0), [128, 64] on each rank

A chapter holds the lines that a pass made or changed; a pass that left all alone has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autoshard.diagnostics import AutoshardError
from autoshard.dsl.suggest import did_you_mean
from autoshard.ir.params import Flat, ParamSpec
from autoshard.ir.print_fold import Line
from autoshard.ir.printer import dtype_text, named_lines, used_axes
from autoshard.ir.program import Program

LONGEST = 30  # lines of one chapter that are shown


@dataclass(frozen=True)
class Chapter:
    """What is new about the name after a pass."""

    step: str
    lines: tuple[tuple[str, str], ...]  # (graph, line)


@dataclass
class Life:
    """Follows ``name``: ask ``watch`` after each pass, then read ``chapters``."""

    name: str
    chapters: list[Chapter] = field(default_factory=list)
    known: set[str] = field(default_factory=set)  # every name that was met
    _told: list[tuple[str, str]] = field(default_factory=list)  # after the last pass

    def watch(self, step: str, program: Program) -> None:
        """Note what the pass ``step`` changed about the name."""
        found = self._about(program)
        news = tuple(line for line in found if line not in self._told)
        if news:
            self.chapters.append(Chapter(step, news))
        self._told = found

    def text(self) -> str:
        """Return the chapters as text; raise AutoshardError when nothing bears the name."""
        if not self.chapters:
            raise AutoshardError(
                f"no parameter, module or value of the program is called `{self.name}`",
                help=did_you_mean(self.name, self.known),
            )
        return "\n".join(line for chapter in self.chapters for line in _shown(chapter))

    def _about(self, program: Program) -> list[tuple[str, str]]:
        self.known |= {name for spec in program.params for name in (spec.fqn, *spec.aliases)}
        found, names = [], {self.name}
        if self.name in program.params:
            spec = program.params[self.name]
            names |= {spec.fqn, *spec.aliases}
            names |= {b.name for b in program.buckets if spec.fqn in b.fqns}
            found.append(("parameter", describe_parameter(spec, program)))
        axes = used_axes(program)
        for graph, function in program.functions():
            lines = named_lines(function, axes)
            self.known |= {name for line in lines for name in (line.name, line.path) if name}
            found += [(graph, line.text) for line in lines if self._is_about(line, names)]
        return found

    def _is_about(self, line: Line, names: set[str]) -> bool:
        own = {line.path, line.name.rstrip("'")}
        return bool(names & own) or self.name in line.reads or _port_of(line) in names


def _port_of(line: Line) -> str:
    """Return the parameter, bucket or gradient that an input or output line stands for."""
    words = line.text.removeprefix("return ").replace(":", " ").split()
    return words[1] if len(words) > 1 else ""


def describe_parameter(spec: ParamSpec, program: Program) -> str:
    """Return shape, names, placements, stages and storage of a parameter or buffer."""
    kind = "buffer " if spec.is_buffer else "" if spec.requires_grad else "frozen "
    parts = [f"{kind}{dtype_text(spec.dtype)}{list(spec.shape)}"]
    if spec.aliases:
        parts.append(f"one tensor with {', '.join(spec.aliases)}")
    if spec.whole_shape != spec.shape:
        parts.append(f"kept as {list(spec.whole_shape)}")
    sharded = [axis.name for axis in program.mesh.axes if spec.is_sharded(axis.name)]
    if sharded:
        lies = " ".join(f"{spec.placements[axis]}@{axis}" for axis in sharded)
        parts.append(f"{lies}: {list(spec.local_shape(program.mesh))} on each rank")
    if spec.homes and len(program.stages) > 1:
        parts.append(f"stage {', '.join(map(str, spec.homes))}")
    if spec.storage.bucket:
        parts.append(f"in bucket {spec.storage.bucket} at {spec.storage.offset}")
    if isinstance(spec.storage, Flat):
        axis = spec.storage.axis
        parts.append(f"1/{program.mesh.size(axis)} of that on each rank of {axis}")
    return ", ".join(parts)


def _shown(chapter: Chapter) -> list[str]:
    rows = [f"  {graph:9}  {text}" for graph, text in chapter.lines[:LONGEST]]
    left = len(chapter.lines) - LONGEST
    return [chapter.step, *rows, *([f"  ... {left} more lines"] if left > 0 else [])]
