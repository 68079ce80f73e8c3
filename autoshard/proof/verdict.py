"""The verdict: a row for each link of the chain from the plain model to what runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum

LINKS = (
    "capture",  # the graph is the eager model
    "types",  # placements re-inferred over the joint graphs
    "erasure",  # without its communication the program is the plain model's joint graph
    "order",  # all ranks' collectives and transfers admit a run
    "numbers",  # lock step against the plain model
    "code generation",  # the text that ranks run is the graph
    "kernels",  # compiled operators compute what their references do
    "optimizer",  # norm, clipping and updates on shards
)


class Status(Enum):
    """How far a link was checked."""

    PROVED = "proved"
    CHECKED = "checked"  # numerically, on the shown sizes
    UNPROVEN = "unproven"
    WRONG = "wrong"
    SKIPPED = "not compared"


@dataclass(frozen=True)
class Row:
    """What is known of one link; ``findings`` say what is wrong or unproven, one a line."""

    link: str
    status: Status
    summary: str
    findings: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """All rows of one verification."""

    rows: tuple[Row, ...]

    @property
    def is_good(self) -> bool:
        """Tell whether nothing is wrong."""
        return all(row.status is not Status.WRONG for row in self.rows)

    @property
    def is_complete(self) -> bool:
        """Tell whether nothing is wrong, unproven or skipped."""
        return all(row.status in (Status.PROVED, Status.CHECKED) for row in self.rows)

    def row(self, link: str) -> Row | None:
        """Return the row of a link, None when it was not looked at."""
        return next((row for row in self.rows if row.link == link), None)

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            lines.append(f"{row.link:<15} {row.status.value:<13} {row.summary}")
            lines += [f"    {line}" for text in row.findings for line in text.splitlines()]
        lines.append(f"{'verdict':<15} {self.conclusion}")
        return "\n".join(lines)

    @property
    def conclusion(self) -> str:
        """Return what follows from the rows, and no more."""
        if not self.is_good:
            return "WRONG: do not run this plan"
        open_links = [r.link for r in self.rows if r.status in (Status.UNPROVEN, Status.SKIPPED)]
        if open_links:
            return f"nothing wrong; not shown: {', '.join(open_links)}"
        return "equal to the plain model"

    def to_json(self) -> dict[str, object]:
        """Return the verdict as plain data."""
        rows = [asdict(row) | {"status": row.status.value} for row in self.rows]
        flags = {"good": self.is_good, "complete": self.is_complete}
        return {**flags, "verdict": self.conclusion, "rows": rows}
