"""What ranks check of each other at the start of a step: the same call, batches that fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoshard.diagnostics import BatchError, RuntimeMismatchError
from autoshard.mesh import Mesh
from autoshard.runtime.batch import Leaves, batch_signature, hash_text, hash_values
from autoshard.runtime.control import Control, name_ranks

CALLS = ("forward_backward", "evaluate")


@dataclass(frozen=True)
class Call:
    """One call of the engine as the ranks compare it."""

    kind: str  # one of CALLS
    number: int  # calls of this kind before
    compare_values: bool  # whether tensor and pipeline peers must show that they hold one batch


def agree_on_batch(
    control: Control, mesh: Mesh, call: Call, prepare: Callable[[], Leaves]
) -> Leaves:
    """Return the prepared leaves if all ranks make the same call with batches that fit.

    One small exchange; a rank whose ``prepare`` raises stops all of them.
    """
    if control.size == 1:
        return prepare()
    prepared: list[Leaves] = []
    row: list[int] = []

    def describe() -> None:
        leaves = prepare()
        prepared.append(leaves)
        values = hash_values(leaves) if call.compare_values else 0
        signature = hash_text(str(batch_signature(leaves)))
        row.extend([CALLS.index(call.kind), call.number, signature, values])

    failure = _attempt(describe)
    rows = control.gather([failure is not None, *(row or [0] * 4)])
    if any(r[0] for r in rows):
        control.together(lambda: _raise(failure))
    _same_call(rows)
    _same_signature(control, rows, prepared[0])
    _same_values(mesh, rows)
    return prepared[0]


def _attempt(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except Exception as error:  # raised again below, after the other ranks have heard of it
        return error
    return None


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _same_call(rows: list[list[int]]) -> None:
    for rank, (_, kind, number, *_) in enumerate(rows):
        if [kind, number] != rows[0][1:3]:
            raise RuntimeMismatchError(
                f"rank {rank} is in its {CALLS[kind]} number {number + 1},"
                f" rank 0 in its {CALLS[rows[0][1]]} number {rows[0][2] + 1}",
                help="all ranks must make the same calls in the same order",
            )


def _same_signature(control: Control, rows: list[list[int]], leaves: Leaves) -> None:
    if len({row[3] for row in rows}) == 1:
        return
    texts = control.gather_text(_signature_text(leaves))
    odd = next(rank for rank, text in enumerate(texts) if text != texts[0])
    raise BatchError(
        f"rank {odd} got a batch of other shapes than rank 0: {texts[odd]} against {texts[0]}",
        help="shapes and dtypes must be equal on all ranks in one step: pad to one length",
    )


def _same_values(mesh: Mesh, rows: list[list[int]]) -> None:
    """Ranks with one data parallel coordinate compute one batch together."""
    for index in range(mesh.size("dp")):
        peers = [rank for rank in range(len(rows)) if mesh.index(rank, "dp") == index]
        odd = [rank for rank in peers if rows[rank][4] != rows[peers[0]][4]]
        if odd:
            raise RuntimeMismatchError(
                f"{name_ranks(odd)} got another batch than rank {peers[0]}, but they compute one"
                f" batch together (dp coordinate {index} of {mesh.size('dp')})",
                help="key the data by engine.dp_rank of engine.dp_size, not by the global rank",
            )


def _signature_text(leaves: Leaves) -> str:
    return ", ".join(
        f"{n} {d.removeprefix('torch.')}{list(s)}" for n, s, d in batch_signature(leaves)
    )
