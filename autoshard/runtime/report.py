"""What a rank runs and keeps, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autoshard.cost.peak import CATEGORIES, HOST, Peak
from autoshard.cost.replay import peak_of
from autoshard.runtime.device import Allocator
from autoshard.runtime.executor import Executable
from autoshard.runtime.layout import scheduled
from autoshard.runtime.storage import Storage
from autoshard.units import show_bytes


@dataclass(frozen=True)
class Report:
    """Lines of text; prints itself."""

    lines: tuple[str, ...]

    @classmethod
    def of(
        cls,
        executable: Executable,
        signatures: Sequence[tuple],
        notes: Sequence[str] = (),
        optimizer: str = "adamw",
        measured: Peak | None = None,
        allocator: Allocator | None = None,
    ) -> Report:
        """Describe one rank's executable, the programs compiled so far, and its peak of memory."""
        program, storage = executable.program, executable.storage
        place = ", ".join(f"{a} {executable.comm.index(a)}" for a in program.mesh.names)
        lines = [
            f"mesh       {program.mesh}; this rank: {place or 'the only one'}",
            f"stages     {len(program.stages)}; this rank holds {list(storage.stages)}",
            f"schedule   {scheduled(program).name}, {program.num_microbatches} micro-batches",
            f"parameters {len(storage.parameters)} here, {storage.nbytes()} bytes stored",
        ]
        lines += _offloaded(storage)
        lines += [f"program    {_signature(item)}" for item in signatures]
        has_host, coordinate = storage.host is not None, executable.comm.index("pp")
        predicted = peak_of(program, coordinate, optimizer, has_host=has_host)
        memory = memory_lines(predicted, measured, allocator)
        return cls((*lines, *executable.notes, *notes, *memory))

    def save(self, path: str | Path) -> None:
        """Write the text to a file."""
        Path(path).write_text(f"{self}\n")

    def __str__(self) -> str:
        """Return the text."""
        return "\n".join(self.lines)


def memory_lines(
    predicted: Peak, measured: Peak | None, allocator: Allocator | None = None
) -> list[str]:
    """Return a peak by category, beside the measured one and their difference if there is one.

    What an ``allocator`` counted stands beside the sum of live tensors.
    """
    lines = [f"memory     {show_bytes(predicted.total)} predicted at {predicted.place}"]
    if measured is not None:
        off = predicted.total / measured.total - 1
        lines.append(f"           {show_bytes(measured.total)} measured at {measured.place}")
        lines.append(f"           predicted is {off:+.2%} off")
    if measured is not None and allocator is not None:
        more = allocator.allocated - measured.total
        lines.append(
            f"           {show_bytes(allocator.allocated)} allocated by torch.cuda, {more:+d} B: "
            f"kernels, rounding, other tensors; {show_bytes(allocator.reserved)} reserved"
        )
    for name in CATEGORIES:
        there = None if measured is None else measured.sizes.get(name, 0)
        lines.append(_memory_line(name, predicted.sizes.get(name, 0), there))
    if predicted.gathered:
        there = None if measured is None else measured.gathered
        lines.append(f"{_memory_line('most gathered', predicted.gathered, there)}, at any moment")
    if predicted.host or (measured is not None and measured.host):
        there = None if measured is None else measured.host
        lines.append(f"{_memory_line(HOST, predicted.host, there)}, in no sum above")
    return lines


def _memory_line(name: str, predicted: int, measured: int | None) -> str:
    line = f"           {name:<14}{show_bytes(predicted):>10}"
    if measured is None:
        return line
    return f"{line}{show_bytes(measured):>12} measured, {predicted - measured:+d} B"


def _offloaded(storage: Storage) -> list[str]:
    """Say where offloaded buckets lie, if the plan asks for it."""
    away = [name for name, bucket in storage.layout.buckets.items() if bucket.on_host]
    if not away:
        return []
    if storage.host is None:
        return ["offload    nothing to do: this rank computes on the CPU, in host memory"]
    nbytes = sum(storage.stored[name].nbytes for name in away)
    return [f"offload    {nbytes} bytes of parameters in pinned host memory"]


def _signature(item: tuple) -> str:
    training, leaves = item
    shapes = ", ".join(f"{n} {d.removeprefix('torch.')}{list(s)}" for n, s, d in leaves)
    return f"{'train' if training else 'eval'}: {shapes}"
