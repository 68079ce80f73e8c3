"""What a pass is: a frozen dataclass whose fields are its options, with a contract."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Literal

from torch.fx import Node

from autoshard.diagnostics import Remark
from autoshard.ir.node_info import info
from autoshard.ir.program import Level, Program

if TYPE_CHECKING:
    from autoshard.dsl.resolve import Resolved


Kind = Literal["applied", "missed", "note"]


class Numerics(Enum):
    """How far a pass may move results; tests take their tolerance from it."""

    BITWISE = "bitwise"
    REASSOCIATES = "reassociates"
    APPROXIMATES = "approximates"


@dataclass
class PassContext:
    """What a pass may read besides the program, and where it reports."""

    resolved: Resolved
    remarks: list[Remark] = field(default_factory=list)
    pass_name: str = ""

    def applied(self, where: Node | str, message: str) -> None:
        """Report a rewrite."""
        self._remark("applied", where, message)

    def missed(self, where: Node | str, message: str) -> None:
        """Report a near miss and why it was left alone."""
        self._remark("missed", where, message)

    def note(self, where: Node | str, message: str) -> None:
        """Report anything else a reader of `inspect` should know."""
        self._remark("note", where, message)

    def _remark(self, kind: Kind, where: Node | str, message: str) -> None:
        place = where if isinstance(where, str) else info(where).path or where.name
        self.remarks.append(Remark(self.pass_name, kind, place, message))


@dataclass(frozen=True)
class Pass:
    """One rewrite of a Program. Subclasses set the class fields, options are dataclass fields.

    A pass whose pattern is absent does nothing; a second run changes nothing.
    """

    name: ClassVar[str]
    group: ClassVar[str]  # capture fuse tensor pipeline zero precision recompute schedule
    level: ClassVar[Level]
    assumes: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()
    numerics: ClassVar[Numerics] = Numerics.BITWISE

    def run(self, program: Program, ctx: PassContext) -> None:
        """Rewrite ``program`` in place."""
        raise NotImplementedError

    def __str__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        options = ",".join(f"{f.name}={getattr(self, f.name)}" for f in changed)
        return f"{self.name}{{{options}}}" if options else self.name
