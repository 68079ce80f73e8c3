"""Read plans: from text or a file, with settings given on the command line put on top."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from autoshard.diagnostics import Diagnostic, PlanError, Severity, as_errors
from autoshard.dsl.build import Draft
from autoshard.dsl.includes import Loader, read_beside
from autoshard.plan import Plan
from autoshard.source import Source


@dataclass(frozen=True)
class Loaded:
    """Hold a plan with what was found while reading it; faulty parts are left out of the plan."""

    plan: Plan
    source: Source
    diagnostics: tuple[Diagnostic, ...] = ()
    complete: bool = True  # False when syntax errors hide a part of the plan

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """Return the diagnostics that are errors."""
        return tuple(d for d in self.diagnostics if d.severity is Severity.ERROR)

    def require(self, strict: bool = False) -> Plan:
        """Return the plan, or raise `PlanError` with every error; `strict` makes warnings such."""
        found = as_errors(self.diagnostics) if strict else self.errors
        if found:
            raise PlanError(in_order(found))
        return self.plan


def load(source: Source, sets: Iterable[str] = (), loader: Loader = read_beside) -> Loaded:
    """Read a plan; each of `sets` is `block.setting=value` and wins over the file."""
    draft = Draft(loader)
    draft.add_text(source)
    found = list(draft.diagnostics)
    unclosed = [d for d in found if d.code == "AS004"]
    if unclosed:  # what follows an open brace was read in the wrong place: say only that
        found = [d for d in found if d.code.startswith("AS00")]
    for text in sets:
        found += _add_set(draft, text)
    if not any(d.severity is Severity.ERROR for d in found):
        found += draft.variables.unused(source)
    complete = not any(d.code.startswith("AS00") for d in found)
    return Loaded(draft.plan(), source, tuple(dict.fromkeys(found)), complete)


def load_file(path: str | Path, sets: Iterable[str] = ()) -> Loaded:
    """Read a plan from a file, or raise `PlanError` when the file can't be read."""
    return load(read_source(path), sets)


def read_source(path: str | Path) -> Source:
    """Return the text of a file under its name."""
    try:
        return Source(str(path), Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = (getattr(error, "strerror", None) or "").lower() or "it isn't UTF-8 text"
        raise PlanError(f"can't read the plan `{path}`: {reason}", code="AS007") from error


def in_order(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Return diagnostics as they are shown: errors first, then by file and line."""

    def key(diagnostic: Diagnostic) -> tuple[bool, str, int]:
        span = diagnostic.span
        place = (span.source.name, span.line) if span else ("", 0)
        return (diagnostic.severity is not Severity.ERROR, *place)

    return sorted(diagnostics, key=key)


def _add_set(draft: Draft, text: str) -> list[Diagnostic]:
    """Add one setting from the command line as if a file of its own said it."""
    name, equals, value = text.partition("=")
    block, dot, setting = name.strip().rpartition(".")
    before = len(draft.diagnostics)
    if not (equals and dot):
        help = ("write it as `--set mesh.tp=4`",)
        return [Diagnostic("AS008", f"`--set {text}` names no setting", None, "", help)]
    source = Source(f"--set {text}", f"autoshard 1; {block} {{ {setting} = {value.strip()} }}")
    draft.add_text(source)
    return draft.diagnostics[before:]
