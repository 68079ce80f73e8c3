"""What a rank runs and keeps, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autoshard.runtime.executor import Executable
from autoshard.runtime.layout import scheduled


@dataclass(frozen=True)
class Report:
    """Lines of text; prints itself."""

    lines: tuple[str, ...]

    @classmethod
    def of(
        cls, executable: Executable, signatures: Sequence[tuple], notes: Sequence[str] = ()
    ) -> Report:
        """Describe one rank's executable and the programs compiled so far."""
        program, storage = executable.program, executable.storage
        place = ", ".join(f"{a} {executable.comm.index(a)}" for a in program.mesh.names)
        lines = [
            f"mesh       {program.mesh}; this rank: {place or 'the only one'}",
            f"stages     {len(program.stages)}; this rank holds {list(storage.stages)}",
            f"schedule   {scheduled(program).name}, {program.num_microbatches} micro-batches",
            f"parameters {len(storage.parameters)} here, {storage.nbytes()} bytes stored",
        ]
        lines += [f"program    {_signature(item)}" for item in signatures]
        return cls((*lines, *notes))

    def save(self, path: str | Path) -> None:
        """Write the text to a file."""
        Path(path).write_text(f"{self}\n")

    def __str__(self) -> str:
        """Return the text."""
        return "\n".join(self.lines)


def _signature(item: tuple) -> str:
    training, leaves = item
    shapes = ", ".join(f"{n} {d.removeprefix('torch.')}{list(s)}" for n, s, d in leaves)
    return f"{'train' if training else 'eval'}: {shapes}"
