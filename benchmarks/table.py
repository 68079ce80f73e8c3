"""From what all ranks measured to rows: ratios within rounds, spreads, and what may be said."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tabulate import tabulate

from benchmarks.config import Launch

FLOOR = "no communication"


@dataclass(frozen=True)
class Spread:
    """The median over rounds, with the least and the most."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise one value a round."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        """Return it with two decimals, as it stands in a table."""
        return f"{self.median:.2f} [{self.least:.2f}, {self.most:.2f}]"

    @property
    def word(self) -> str:
        """Say who was faster, unless rounds disagree about it."""
        if self.most < 1:
            return "ours"
        return "the peer" if self.least > 1 else "no difference seen"


@dataclass(frozen=True)
class Figures:
    """One entrant: by round the slowest rank's seconds, and the CPU seconds of all ranks."""

    wall: list[float]
    cpu: list[float]
    sent: float  # bytes a rank and step
    losses: list[float]

    def over(self, other: Figures) -> tuple[Spread, Spread]:
        """Return the ratios of wall and of CPU seconds, round by round."""
        wall = [a / b for a, b in zip(self.wall, other.wall, strict=True)]
        cpu = [a / b for a, b in zip(self.cpu, other.cpu, strict=True)]
        return Spread.of(wall), Spread.of(cpu)


def figures(ranks: Sequence[dict]) -> dict[str, Figures]:
    """Join what the ranks of a launch measured."""
    found = {}
    for name, losses in ranks[0]["losses"].items():
        rounds = list(zip(*(rank["rounds"][name] for rank in ranks), strict=True))
        found[name] = Figures(
            wall=[max(part["wall"] for part in parts) for parts in rounds],
            cpu=[sum(part["cpu"] for part in parts) for parts in rounds],
            sent=statistics.median(parts[0]["sent"] for parts in rounds) / len(ranks),
            losses=losses,
        )
    return found


def rows(launch: Launch, found: dict[str, Figures]) -> list[dict]:
    """Return each row of a launch: ours over the peer, and both over the floor."""
    floor = found.get(FLOOR)
    result = []
    for row in launch.rows:
        ours, peer = found[f"ours: {row.ours}"], found[row.peer]
        wall, cpu = ours.over(peer)
        result.append(
            {
                "launch": launch.name,
                "ranks": launch.world,
                "ours": row.ours,
                "peer": row.peer,
                "ours_ms": 1000 * statistics.median(ours.wall),
                "peer_ms": 1000 * statistics.median(peer.wall),
                "ratio": asdict(wall),
                "cpu_ratio": asdict(cpu),
                "ours_over_floor": asdict(ours.over(floor)[0]) if floor else None,
                "peer_over_floor": asdict(peer.over(floor)[0]) if floor else None,
                "ours_sent": ours.sent,
                "peer_sent": peer.sent,
                "faster": wall.word,
            }
        )
    return result


def cores_used(found: dict[str, Figures]) -> float:
    """Return CPU seconds over seconds: how much of the machine the ranks got."""
    return sum(sum(f.cpu) for f in found.values()) / sum(sum(f.wall) for f in found.values())


HEADS = (
    "ranks",
    "ours",
    "peer",
    "ours ms",
    "peer ms",
    "ours / peer",
    "CPU ours / peer",
    "ours / floor",
    "peer / floor",
    "MB sent",
    "peer MB",
    "faster",
)


def text(table: Sequence[dict], style: str = "simple") -> str:
    """Return rows as a table."""
    return tabulate([_cells(row) for row in table], HEADS, style, disable_numparse=True)


def _cells(row: dict) -> list[str]:
    over = [row["ours_over_floor"], row["peer_over_floor"]]
    return [
        str(row["ranks"]),
        row["ours"],
        row["peer"],
        f"{row['ours_ms']:.0f}",
        f"{row['peer_ms']:.0f}",
        str(Spread(**row["ratio"])),
        str(Spread(**row["cpu_ratio"])),
        *(str(Spread(**ratio)) if ratio else "-" for ratio in over),
        *(f"{row[key] / 1e6:.2f}" if row[key] else "-" for key in ("ours_sent", "peer_sent")),
        row["faster"],
    ]
