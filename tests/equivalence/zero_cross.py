"""Train by every setting of ZeRO, in lock step in float64, beside the captured model.

    python -m tests.equivalence.zero_cross

The cross: stages 0 to 3 x buckets {tiny, medium, one} x {tied, uneven, frozen} on three ranks;
stage 3 also x prefetch {0, 1, 4} x reshard_after_forward {on, off, step}. Compared are loss, every
gradient, the norm and the updated parameters of two steps, and stage 3 with prefetch bit for bit
with itself without. `test_prefetch.py` has the covering subset.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import product

import torch

from autoshard.testing.equivalence import TOLERANCE, compare_compiled
from autoshard.testing.lockstep import StepRecord
from tests.bank.odd import odd
from tests.equivalence.test_prefetch import BUCKETS, DEPTHS, DP, KINDS, RESHARD, compiled, reference

Cell = tuple[str, int, str, str, int]  # kind, stage, bucket, reshard_after_forward, prefetch


def cross() -> Iterator[Cell]:
    """Yield every cell; those that must be bit-equal stand together, no prefetch first."""
    for kind, bucket in product(KINDS, BUCKETS):
        yield from ((kind, stage, bucket, "on", 0) for stage in range(3))
        yield from ((kind, 3, bucket, reshard, d) for reshard, d in product(RESHARD, DEPTHS))


def run(cell: Cell) -> tuple[float, str, tuple[StepRecord, ...]]:
    """Return the largest relative error, where it is, and what was computed."""
    kind, stage, bucket, reshard, depth = cell
    more = f"reshard_after_forward = {reshard}, prefetch = {depth}" if stage == 3 else ""
    program = compiled(kind, stage, bucket, more)
    model, batch, _ = odd(kind, 2 * DP)
    found = compare_compiled(program, model, batch, reference(kind))
    return found.worst.error, found.worst.what, found.ours


def is_same(ours: tuple[StepRecord, ...], theirs: tuple[StepRecord, ...]) -> bool:
    """Tell whether two runs are equal bit for bit."""
    return all(
        torch.equal(a.loss, b.loss)
        and all(torch.equal(a.grads[n], b.grads[n]) for n in b.grads)
        and all(torch.equal(a.params[n], b.params[n]) for n in b.params)
        for a, b in zip(ours, theirs, strict=True)
    )


def main() -> int:
    """Run the cross and print what was found; 1 when anything is wrong."""
    start, count, worst, wrong = time.perf_counter(), 0, (0.0, "", ()), []
    late: tuple[StepRecord, ...] = ()
    for cell in cross():
        error, what, ours = run(cell)
        count += 1
        worst = max(worst, (error, what, cell), key=lambda found: found[0])
        if not error <= TOLERANCE:
            wrong.append(f"{cell}: {what} {error:.1e}")
        late = ours if cell[4] == 0 else late
        if not is_same(ours, late):
            wrong.append(f"{cell}: not bit-equal to itself without prefetch")
    seconds = time.perf_counter() - start
    print(f"{count} cells in {seconds:.0f} s: {len(wrong)} wrong; worst {worst[0]:.1e} {worst[1:]}")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
