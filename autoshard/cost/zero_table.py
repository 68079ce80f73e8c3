"""Bytes of model state on one rank under ZeRO, by formula: the paper's count beside our own.

Table 1 of Rajbhandari et al. 2020 counts Adam in half precision: 2 bytes of parameter, 2 of
gradient, 12 of optimizer (a float32 copy and two moments). Nothing here is compiled or measured;
`cost.memory` counts the same for a program, from its graphs. Free of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tabulate import tabulate

from autoshard.plan import PrecisionBlock
from autoshard.units import split_number

RANKS = (1, 4, 16, 64, 256, 1024)
STAGES = (1, 2, 3)
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
COUNTS = {"M": 10**6, "B": 10**9, "T": 10**12}
GB = 10**9


@dataclass(frozen=True)
class ModelState:
    """Bytes that one parameter takes while nothing is cut."""

    params: int  # as phases read them; cut by stage 3
    grads: int  # cut by stage 2
    optimizer: int  # masters that aren't the parameters themselves, and moments; cut by stage 1

    @property
    def total(self) -> int:
        """Return the sum: 16 as the paper counts, 18 with gradients in float32."""
        return self.params + self.grads + self.optimizer

    def bytes_per_parameter(self, stage: int, ranks: int) -> Fraction:
        """Return what a parameter takes on one of ``ranks`` ranks, padding not counted.

        >>> PAPER.bytes_per_parameter(2, 64)  # 2 + 14/N
        Fraction(71, 32)
        """
        cut_by = ((self.optimizer, 1), (self.grads, 2), (self.params, 3))
        return sum(
            (Fraction(nbytes, ranks if stage >= first else 1) for nbytes, first in cut_by),
            Fraction(0),
        )


PAPER = ModelState(2, 2, 12)
PAPER_PRECISION = PrecisionBlock(params="bf16", grads="bf16")


def stored_state(precision: PrecisionBlock, stage: int) -> ModelState:
    """Return what we store of a parameter with Adam.

    Parameters of the masters' own type are the masters. Stage 3 keeps no other copy either: shards
    of masters are cast while they are gathered.

    >>> stored_state(PrecisionBlock(params="bf16"), 1).total
    18
    """
    master, grads = ITEMSIZE[precision.master], ITEMSIZE[precision.grads]
    if precision.params == precision.master:
        return ModelState(master, grads, 2 * master)
    copy = ITEMSIZE[precision.params] if stage < 3 else 0
    return ModelState(copy, grads, 3 * master)


def read_count(text: str) -> Fraction | None:
    """Read `7.5B` as a number of parameters; None where it is none."""
    split = split_number(text)
    return split[0] * COUNTS[split[1]] if split and split[1] in COUNTS else None


def zero_table(sizes: Sequence[str], precision: PrecisionBlock = PAPER_PRECISION) -> str:
    """Return the paper's Table 1 for models of ``sizes`` parameters, and our own below it."""
    whole, cut = stored_state(precision, 0), stored_state(precision, 3)
    kept = (
        "" if whole.params == cut.params else "; stage 3 casts shards of masters and keeps no copy"
    )
    return "\n\n".join(
        [
            "model state on one rank in GB (10^9 bytes), with Adam",
            f"as the ZeRO paper counts: {_sum(PAPER)}",
            _rows(sizes, [PAPER] * len(STAGES)),
            f"as stored with params = {precision.params}, grads = {precision.grads}: "
            f"{_sum(whole)}{kept}",
            _rows(sizes, [stored_state(precision, stage) for stage in STAGES]),
        ]
    )


def gigabytes(size: str, state: ModelState, stage: int, ranks: int) -> Fraction:
    """Return the model state of one rank in GB."""
    count = read_count(size)
    assert count is not None, size
    return count * state.bytes_per_parameter(stage, ranks) / GB


def _rows(sizes: Sequence[str], states: Sequence[ModelState]) -> str:
    columns = [
        (size, stage, state) for size in sizes for stage, state in zip(STAGES, states, strict=True)
    ]
    heads = ["ranks", *(f"{size}, stage {stage}" for size, stage, _ in columns)]
    rows = [
        [ranks, *(_show(gigabytes(size, state, stage, ranks)) for size, stage, state in columns)]
        for ranks in RANKS
    ]
    return tabulate(rows, heads, disable_numparse=True, colalign=("right",) * len(heads))


def _sum(state: ModelState) -> str:
    return f"{state.params} + {state.grads} + {state.optimizer} = {state.total} bytes a parameter"


def _show(value: Fraction) -> str:
    """Return three digits, or all before the point."""
    return f"{float(value):.0f}" if value >= 1000 else f"{float(value):.3g}"
