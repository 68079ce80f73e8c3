"""A pipeline schedule: which rank does which actions in which order, and its two text forms."""

import csv
import io
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autoshard.diagnostics import ScheduleError
from autoshard.schedule.action import COMPUTE, Action, Kind


@dataclass(frozen=True)
class Schedule:
    """List the actions of every pipeline rank, in program order.

    Stages are numbered along the model; `stage_to_rank[s]` is the pipeline rank that holds
    stage `s`. The text form has a head and one line a rank, and parses back to an equal value.
    """

    name: str
    num_stages: int
    num_microbatches: int
    stage_to_rank: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Return the number of pipeline ranks."""
        return len(self.ranks)

    @property
    def virtual_stages(self) -> int:
        """Return the number of stages of the rank that holds most."""
        return max(self.stage_to_rank.count(rank) for rank in range(self.num_ranks))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` holds, in model order."""
        return tuple(s for s, holder in enumerate(self.stage_to_rank) if holder == rank)

    def is_lowered(self) -> bool:
        """Tell whether any rank has an action that isn't compute."""
        return any(action.kind not in COMPUTE for rank in self.ranks for action in rank)

    def only(self, kinds: Collection[Kind]) -> "Schedule":
        """Return the schedule without the actions of other kinds."""
        ranks = tuple(tuple(a for a in row if a.kind in kinds) for row in self.ranks)
        return replace(self, ranks=ranks)

    def positions(self) -> Iterator[tuple[int, int, Action]]:
        """Yield (rank, index, action) for every action, rank by rank."""
        for rank, actions in enumerate(self.ranks):
            for index, action in enumerate(actions):
                yield rank, index, action

    def __str__(self) -> str:
        """Return the text form, which `parse` reads back."""
        placement = ",".join(str(rank) for rank in self.stage_to_rank)
        head = f"schedule {self.name} microbatches={self.num_microbatches} stages={placement}"
        lines = (
            f"rank {r}: {' '.join(map(str, row))}".rstrip() for r, row in enumerate(self.ranks)
        )
        return "\n".join([head, *lines])

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Return the schedule that prints as `text`; raise ScheduleError for any other text."""
        head, *lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
        match = _HEAD.fullmatch(head)
        if match is None:
            raise ScheduleError(
                f"'{head}' isn't the head of a schedule",
                help="a head reads 'schedule NAME microbatches=8 stages=0,1' (stages: their ranks)",
            )
        rows = tuple(_parse_row(number, line) for number, line in enumerate(lines))
        placement = tuple(int(rank) for rank in match[3].split(","))
        return cls(match[1], len(placement), int(match[2]), placement, rows)

    def to_csv(self) -> str:
        """Return torch's CSV form: one row a rank, one cell an action; it holds no placement."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(map(str, row) for row in self.ranks)
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> "Schedule":
        """Return the schedule of torch's CSV form.

        Empty cells (idle) are skipped; torch's overlapped pair ``(0F1;7B0)OVERLAP_F_B`` becomes
        its two actions in that order. Placement and micro-batches are read off the actions.
        """
        rows = [row for row in csv.reader(io.StringIO(text)) if row]
        ranks = tuple(_csv_actions(rank, row) for rank, row in enumerate(rows))
        placement = _read_placement(ranks)
        microbatches = {a.microbatch for row in ranks for a in row if a.microbatch is not None}
        return cls(name, len(placement), max(microbatches) + 1, placement, ranks)


_HEAD = re.compile(r"schedule (\S+) microbatches=(\d+) stages=(\d+(?:,\d+)*)")
_ROW = re.compile(r"rank (\d+):(.*)")
_OVERLAP = re.compile(r"\(([^)]*)\)OVERLAP_F_B")


def _parse_row(number: int, line: str) -> tuple[Action, ...]:
    match = _ROW.fullmatch(line)
    if match is None or int(match[1]) != number:
        raise ScheduleError(f"line {number + 2} of a schedule must begin with 'rank {number}:'")
    return tuple(Action.parse(word) for word in match[2].split())


def _csv_actions(rank: int, row: Iterable[str]) -> tuple[Action, ...]:
    actions: list[Action] = []
    for place, cell in enumerate(row):
        overlapped = _OVERLAP.fullmatch(cell.strip())
        words = overlapped[1].split(";") if overlapped else [cell]
        try:
            actions += [Action.parse(word) for word in words if word.strip()]
        except ScheduleError as error:
            where = f"rank {rank}, cell {place + 1}: "
            placed = (replace(d, message=f"{where}{d.message}") for d in error.diagnostics)
            raise ScheduleError(placed) from error
    return tuple(actions)


def _read_placement(ranks: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    holder: dict[int, int] = {}
    for rank, row in enumerate(ranks):
        for action in row:
            if action.kind not in COMPUTE:
                continue
            first = holder.setdefault(action.stage, rank)
            if first != rank:
                raise ScheduleError(f"stage {action.stage} computes on rank {first} and {rank}")
    if not holder:
        raise ScheduleError("a schedule needs at least one compute action; the file has none")
    missing = sorted(set(range(max(holder) + 1)) - set(holder))
    if missing:
        raise ScheduleError(f"no rank computes stage {missing[0]} of {max(holder) + 1} stages")
    return tuple(holder[stage] for stage in range(max(holder) + 1))
