"""Write the coverage page: one line a family, the reasons below, and how it was measured."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version

from autoshard.testing.coverage.cells import NAMES, Row
from autoshard.testing.coverage.families import PACKAGE

INTRO = """\
# Families that were measured

Families of transformers {transformers}, built offline from small configurations (width 32, two
layers, four heads, 96 tokens), and small models of other packages, each under the layouts of the
columns: all ranks in lock step, in float64, two steps of AdamW with clipping, beside the plain
model on one process with the whole batch. *equal*: loss, every gradient, the norm and every
parameter agree within 1e-10. *refused*: the compiler said no, by name, with the reason below;
nothing ran. *wrong* would be a number that differs; *crashed* an error without a name: neither may
be on this page. *capture* is compared with the eager model.

The tensor rules are the model's own (`hf`: `use transformers.tp_plan`) or those that
`autoshard plan init` finds in the captured graph (`init`), whichever split more parameters; *split*
is that share. Experts run as `batched_mm` and stay whole on every rank.

Measured with torch {torch}, transformers {transformers}, Python {python}, by

    python -m autoshard.testing.coverage --out docs/coverage.md --family (those below)
"""
TITLES = {
    "causal": "Decoders",
    "masked": "Masked language models",
    "seq2seq": "Encoder-decoders",
    "image": "Image classification",
    PACKAGE: "Other packages",
}


def render(rows: Sequence[Row]) -> str:
    """Return the page of these rows as Markdown."""
    reasons = _Reasons()
    measured = [row for row in rows if row.cells]
    parts = [_intro(), _summary(measured)]
    for kind in TITLES:
        own = [row for row in measured if row.kind == kind]
        if own:
            parts.append(_table(TITLES[kind], own, reasons))
    parts.append(reasons.text())
    parts.append(_unbuilt([row for row in rows if not row.cells]))
    return "\n".join(part for part in parts if part)


def summary(rows: Iterable[Row]) -> dict[str, dict[str, int]]:
    """Return by column how many families came out how."""
    found: dict[str, dict[str, int]] = {name: {} for name in NAMES}
    for row in rows:
        for name, cell in row.cells.items():
            found[name][cell.status] = found[name].get(cell.status, 0) + 1
    return found


def all_equal(row: Row) -> bool:
    """Tell whether a family is equal in every column."""
    return all(name in row.cells and row.cells[name].status == "equal" for name in NAMES)


def _intro() -> str:
    return INTRO.format(
        torch=version("torch"),
        transformers=version("transformers"),
        python=platform.python_version(),
    )


def _summary(rows: Sequence[Row]) -> str:
    counts = summary(rows)
    statuses = [s for s in ("equal", "refused", "wrong", "crashed") if _any(counts, s)]
    equal = sum(map(all_equal, rows))
    return "\n".join(
        [
            f"**{len(rows)} families, {equal} equal in all {len(NAMES)} columns.**\n",
            f"| | {' | '.join(NAMES)} |",
            f"|---|{'---|' * len(NAMES)}",
            *(
                f"| {status} | {' | '.join(str(counts[n].get(status, 0)) for n in NAMES)} |"
                for status in statuses
            ),
            "",
        ]
    )


def _any(counts: dict[str, dict[str, int]], status: str) -> bool:
    return any(status in column for column in counts.values()) or status == "equal"


def _table(title: str, rows: Sequence[Row], reasons: _Reasons) -> str:
    lines = [
        f"## {title}\n",
        f"| family | rules | split | {' | '.join(NAMES)} |",
        f"|---|---|---|{'---|' * len(NAMES)}",
    ]
    for row in rows:
        cells = " | ".join(reasons.cell(row, name) for name in NAMES)
        split = f"{row.split:.0%}" if row.split else ""
        lines.append(f"| {row.family} | {row.plan} | {split} | {cells} |")
    return "\n".join([*lines, ""])


class _Reasons:
    """Numbers the reasons as they come up, each text once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def cell(self, row: Row, name: str) -> str:
        """Return what stands in one cell."""
        cell = row.cells.get(name)
        if cell is None:
            return ""
        if not cell.reason:
            return cell.status
        number = self._numbers.setdefault(cell.reason, len(self._numbers) + 1)
        return f"{cell.status} ({number})"

    def text(self) -> str:
        """Return the list of reasons."""
        if not self._numbers:
            return ""
        lines = (f"{n}. {_escaped(reason)}" for reason, n in self._numbers.items())
        return "\n".join(["## Reasons\n", *lines, ""])


def _unbuilt(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = (f"- {row.family} ({row.kind}): {_escaped(row.note)}" for row in rows)
    head = "Their configuration could not be shrunk by these rules, or they need other inputs.\n"
    return "\n".join(["## Not built\n", head, *lines, ""])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")
