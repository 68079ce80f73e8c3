"""What goes wrong and how it is told: diagnostics, errors, remarks and the caret format."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from autoshard.source import Span


class Severity(Enum):
    """Say whether a diagnostic stops the work."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Label:
    """Mark a second place that explains the first."""

    span: Span
    text: str


@dataclass(frozen=True)
class Diagnostic:
    """Say one thing that is wrong: where, why with numbers, and the way out."""

    code: str
    message: str
    span: Span | None = None
    label: str = ""
    help: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    secondary: tuple[Label, ...] = ()
    severity: Severity = Severity.ERROR


def as_errors(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Return diagnostics of which each is an error, as ``--strict`` takes warnings."""
    return tuple(replace(diagnostic, severity=Severity.ERROR) for diagnostic in diagnostics)


@dataclass(frozen=True)
class Remark:
    """Record what a pass did, could have done, or noticed at one place."""

    pass_name: str
    kind: Literal["applied", "missed", "note"]
    where: str
    message: str

    def __str__(self) -> str:
        """Return one line: pass, kind, place, message."""
        return f"{self.pass_name}: {self.kind}: {self.where}: {self.message}"


class AutoshardError(Exception):
    """Report what stops us; every error of autoshard is one, and prints itself with its place.

    The first argument is a message, or several diagnostics that are reported together.
    """

    exit_code = 1

    def __init__(
        self,
        message: str | Iterable[Diagnostic],
        *,
        code: str = "",
        span: Span | None = None,
        label: str = "",
        help: str | Iterable[str] = (),
        notes: str | Iterable[str] = (),
        secondary: Iterable[Label] = (),
    ) -> None:
        """Keep the diagnostics; `help` and `notes` take one string or several."""
        if isinstance(message, str):
            one = Diagnostic(
                code, message, span, label, _strings(help), _strings(notes), tuple(secondary)
            )
            self.diagnostics: tuple[Diagnostic, ...] = (one,)
        else:
            self.diagnostics = tuple(message)
        super().__init__(message if isinstance(message, str) else "")

    def __str__(self) -> str:
        """Return all diagnostics in the caret format."""
        return "\n\n".join(render(d) for d in self.diagnostics)

    def add_note(self, text: str) -> None:
        """Add context to the last diagnostic; the message itself stays as it was raised."""
        *rest, last = self.diagnostics
        self.diagnostics = (*rest, replace(last, notes=(*last.notes, text)))

    @property
    def code(self) -> str:
        """Return the code of the first diagnostic."""
        return self.diagnostics[0].code if self.diagnostics else ""

    @property
    def span(self) -> Span | None:
        """Return the place of the first diagnostic."""
        return self.diagnostics[0].span if self.diagnostics else None


class PlanError(AutoshardError):
    """Report a plan that is wrong, or that doesn't fit its model."""


class CaptureError(AutoshardError):
    """Report a model that can't be captured as a graph."""


class PassError(AutoshardError):
    """Report a pass that can't do what the plan asks, or a pipeline of passes in a wrong order."""


class PlacementError(AutoshardError):
    """Report a value whose placement isn't what its operation needs."""


class MeshError(AutoshardError):
    """Report a mesh that doesn't fit the processes, or an axis that it lacks."""


class OperatorError(AutoshardError, ValueError):
    """Report arguments that one of our operators doesn't take."""


class BatchError(AutoshardError):
    """Report a batch that doesn't have the shape or the size the plan says."""


class ScheduleError(AutoshardError):
    """Report a pipeline schedule that is invalid or would deadlock."""


class CheckpointError(AutoshardError):
    """Report a state dict that doesn't fit the model."""


class RuntimeMismatchError(AutoshardError):
    """Report ranks that don't agree: another plan, another program, another batch."""


class CommunicationError(AutoshardError):
    """Report a message between ranks that failed: a rank stopped, hangs or did something else."""


class VerifyError(AutoshardError):
    """Report a program that doesn't compute what the plain model computes."""


class NotExecutableError(AutoshardError):
    """Report a setting that plans may hold but that this version can't run yet."""


class InternalError(AutoshardError):
    """Report a mistake of ours, not of the user."""

    exit_code = 3


def render(diagnostic: Diagnostic) -> str:
    """Return the message as text: the place, the line with a caret under it, helps and notes."""
    code = f"[{diagnostic.code}]" if diagnostic.code else ""
    head = f"{diagnostic.severity.value}{code}: {diagnostic.message}"
    tail = [f"= help: {text}" for text in diagnostic.help]
    tail += [f"= note: {text}" for text in diagnostic.notes]
    if diagnostic.span is None:
        return "\n".join([head, *(f"  {line}" for line in tail)])
    marks = [Label(diagnostic.span, diagnostic.label), *diagnostic.secondary]
    width = len(str(max(mark.span.line for mark in marks)))
    gutter = " " * (width + 1) + "|"
    lines = [head, f"{' ' * width}--> {diagnostic.span.place}", gutter]
    lines += _snippets(marks, width)
    if tail:
        lines += [gutter, *(f"{' ' * (width + 1)}{line}" for line in tail)]
    return "\n".join(lines)


def _snippets(marks: list[Label], width: int) -> list[str]:
    """Return the marked source lines in order, the first mark with `^`, the others with `-`."""
    primary, gutter = marks[0], " " * (width + 1) + "|"
    lines: list[str] = []
    shown: tuple[str, int] | None = None
    for mark in sorted(marks, key=lambda m: (m.span.source is not primary.span.source, _at(m))):
        here = (mark.span.source.name, mark.span.line)
        lines += _between(shown, here, primary, mark, gutter)
        if shown != here:
            lines.append(f"{here[1]:>{width}} | {_expand(mark)}".rstrip())
        lines.append(f"{gutter} {_underline(mark, '^' if mark is primary else '-')}".rstrip())
        shown = here
    return lines


def _at(mark: Label) -> tuple[int, int]:
    return (mark.span.line, mark.span.column)


def _between(
    shown: tuple[str, int] | None, here: tuple[str, int], primary: Label, mark: Label, gutter: str
) -> list[str]:
    """Return what separates two marked lines: nothing, dots, or the name of another file."""
    if mark.span.source is not primary.span.source and (shown is None or shown[0] != here[0]):
        return [f"{gutter[:-2]}::: {mark.span.place}", gutter]
    if shown is None or here[1] <= shown[1] + 1:
        return []
    return ["..."]


def _expand(mark: Label) -> str:
    return mark.span.source.line_text(mark.span.line).replace("\t", " ")


def _underline(mark: Label, char: str) -> str:
    """Return the marks under a line and the label behind them; at least one, none past the end."""
    column = mark.span.column - 1
    room = max(1, len(mark.span.source.line_text(mark.span.line)) - column)
    length = max(1, min(mark.span.end - mark.span.start, room))
    return f"{' ' * column}{char * length} {mark.text}"


def _strings(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
