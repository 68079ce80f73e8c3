"""An error of one rank as bytes, to be raised on the others in the same words."""

from __future__ import annotations

import json

from autoshard import diagnostics
from autoshard.diagnostics import AutoshardError, Diagnostic, RuntimeMismatchError
from autoshard.ir.save_values import Decoder, Encoder

ELSEWHERE = "raised on rank 0, which compiles for all ranks"


def pack_error(error: Exception) -> bytes:
    """Return an error with all that it says: place, cause, remedy."""
    if not isinstance(error, AutoshardError) or not error.diagnostics:
        return json.dumps({"line": first_line(error)}).encode()
    writer = Encoder()
    said = [writer.value(diagnostic) for diagnostic in error.diagnostics]
    known = [cls.__name__ for cls in type(error).__mro__ if _is_own(cls.__name__)]
    return json.dumps({"kind": known[0], "said": said, "table": writer.table}).encode()


def unpack_error(raw: bytes) -> AutoshardError:
    """Return the error to raise where it did not happen: of the same kind, with a note of where."""
    held = json.loads(raw)
    if "line" in held:
        return RuntimeMismatchError(
            f"rank 0 can't go on: {held['line']}",
            help="all ranks stop; the whole message is with that rank's output",
        )
    reader = Decoder(held["table"])
    kind = getattr(diagnostics, held["kind"]) if _is_own(held["kind"]) else AutoshardError
    said = [item for item in map(reader.value, held["said"]) if isinstance(item, Diagnostic)]
    error: AutoshardError = kind(said)
    error.add_note(ELSEWHERE)
    return error


def first_line(error: Exception) -> str:
    """Return what an error says, without place and remedy."""
    if isinstance(error, AutoshardError) and error.diagnostics:
        return error.diagnostics[0].message
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _is_own(name: str) -> bool:
    """Tell whether a name is that of one of our errors."""
    found = getattr(diagnostics, name, None)
    return isinstance(found, type) and issubclass(found, AutoshardError)
