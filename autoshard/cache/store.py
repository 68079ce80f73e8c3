"""Programs as files: written whole or not at all, checked when they are read, the oldest given up.

    <folder>/<label>-<key>.program     a line of JSON about the entry, then the saved program

The line holds what the key was made of, so that a miss can say what has changed, and the length and
checksum of what follows. A file that isn't what it says is removed and told about, never used.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "AUTOSHARD_CACHE"  # a folder, or "off"
OFF = "off"
MOST_BYTES = 2 * 2**30  # of all entries together; the ones longest unused go first
FORMAT = "autoshard program 1"
_SUFFIX = ".program"
_OTHERS_WRITE = 0o022


@dataclass(frozen=True)
class Key:
    """What decides a program: the hash of each ingredient by its name."""

    label: str  # of the model, for people: its class
    parts: Mapping[str, str]

    @property
    def text(self) -> str:
        """Return the hash of all ingredients."""
        return hash_of(*(word for item in sorted(self.parts.items()) for word in item))


@dataclass(frozen=True)
class Entry:
    """What a file said: the facts that were stored with a program, and the program's bytes."""

    facts: dict
    payload: bytes


@dataclass(frozen=True)
class Found:
    """What a look-up gave: an entry, or why there is none."""

    entry: Entry | None
    note: str = ""  # in words, for the report


def hash_of(*words: str) -> str:
    """Return a hash of several texts as hexadecimal digits."""
    made = hashlib.blake2b(digest_size=16)
    for word in words:
        raw = word.encode("utf-8", "backslashreplace")
        made.update(len(raw).to_bytes(8, "little") + raw)
    return made.hexdigest()


def default_folder() -> Path | None:
    """Return where programs are kept, None where that is switched off.

    ``AUTOSHARD_CACHE`` names the folder or says "off"; else it is "autoshard" in the user's folder
    for caches.
    """
    said = os.environ.get(VARIABLE)
    if said:
        return None if said == OFF else Path(said).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "autoshard"


class Store:
    """The entries of one folder."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        """Use ``folder``, which need not exist yet."""
        self.folder, self._most = folder, most_bytes

    def find(self, key: Key) -> Found:
        """Return the entry of ``key``; what can't be trusted is removed and told about."""
        path = self._path(key)
        try:
            distrust = _distrust(self.folder) or _distrust(path)
            raw = path.read_bytes()
        except FileNotFoundError:
            return Found(None, self._changed(key))
        except OSError as error:
            return Found(None, f"can't be read ({error.strerror})")
        if distrust:
            return Found(None, f"not used: {distrust}")
        entry, wrong = _parse(raw, key)
        if entry is None:
            self.drop(key)
            return Found(None, f"the entry was {wrong} and is made again")
        with suppress(OSError):  # in a folder that is only to be read, or removed meanwhile
            os.utime(path)
        return Found(entry)

    def drop(self, key: Key) -> None:
        """Remove an entry that turned out to be of no use, where that may be done."""
        with suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def keep(self, key: Key, facts: Mapping[str, object], payload: bytes) -> str:
        """Write an entry, whole or not at all; return why it could not be, "" when it was."""
        head: dict[str, object] = {"format": FORMAT, "key": key.text, "label": key.label}
        head |= {"parts": dict(key.parts), "facts": dict(facts), "bytes": len(payload)}
        head["sum"] = _sum(head, payload)
        raw = json.dumps(head).encode() + b"\n" + payload
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(suffix=".new", dir=self.folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(raw)
                os.replace(name, self._path(key))  # at once: another process reads the old or this
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
            self._make_room(self._path(key))
        except OSError as error:
            return f"can't be written ({error.strerror})"
        return ""

    def paths(self) -> list[Path]:
        """Return the files, the one longest unused first."""
        found = []
        for path in self._files():
            with suppress(FileNotFoundError):  # another process has just removed it
                found.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(found)]

    def heads(self) -> list[tuple[Path, dict]]:
        """Return what each readable entry says of itself, the one longest unused first."""
        found = []
        for path in self.paths():
            with suppress(OSError), path.open("rb") as file:
                head = _head(file.readline())
                if head is not None:
                    found.append((path, head))
        return found

    def clear(self) -> tuple[int, int]:
        """Remove all entries; return how many and how many bytes."""
        files = [*self.paths(), *self.folder.glob("*.new")]
        sizes = _sizes(files)
        for path in files:
            path.unlink(missing_ok=True)
        return len(sizes), sum(sizes.values())

    def _files(self) -> Iterator[Path]:
        return (path for path in self.folder.glob(f"*{_SUFFIX}") if not path.is_dir())

    def _path(self, key: Key) -> Path:
        label = "".join(c if c.isalnum() else "_" for c in key.label)
        return self.folder / f"{label}-{key.text}{_SUFFIX}"

    def _make_room(self, new: Path) -> None:
        """Remove what was unused for longest until the rest fits; ``new`` stays."""
        sizes = _sizes(self.paths())
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total > self._most and path != new:
                path.unlink(missing_ok=True)
                total -= size

    def _changed(self, key: Key) -> str:
        """Say in which ingredients the nearest entry of the same model differs, if there is one."""
        kin = [head["parts"] for _, head in self.heads() if head.get("label") == key.label]
        if not kin:
            return ""
        changed = [
            [name for name, part in key.parts.items() if parts.get(name) != part]
            for parts in reversed(kin)
        ]
        fewest = min(changed, key=lambda names: len(names))
        return f"changed since the nearest entry: {', '.join(fewest)}"


def _sizes(paths: Iterable[Path]) -> dict[Path, int]:
    sizes = {}
    for path in paths:
        with suppress(FileNotFoundError):
            sizes[path] = path.stat().st_size
    return sizes


def _parse(raw: bytes, key: Key) -> tuple[Entry | None, str]:
    """Return the entry, or what is wrong with the bytes."""
    line, _, payload = raw.partition(b"\n")
    head = _head(line)
    if head is None:
        return None, "no saved program"
    if head.get("key") != key.text or head.get("parts") != dict(key.parts):
        return None, "another program's"
    if head.get("bytes") != len(payload):
        return None, f"of {len(payload)} bytes, not {head.get('bytes')} as written"
    if head.pop("sum", None) != _sum(head, payload):
        return None, "damaged (its checksum differs)"
    return Entry(head["facts"], payload), ""


def _head(line: bytes) -> dict | None:
    try:
        head = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, or nested without end
        return None
    good = isinstance(head, dict) and head.get("format") == FORMAT
    return head if good and all(isinstance(head.get(n), dict) for n in ("facts", "parts")) else None


def _sum(head: dict, payload: bytes) -> str:
    made = hashlib.blake2b(json.dumps(head).encode(), digest_size=16)
    made.update(payload)
    return made.hexdigest()


def _distrust(path: Path) -> str:
    """Say why what lies there may have been written by someone else, "" if it wasn't."""
    status = path.stat()
    if status.st_uid != os.getuid():
        return f"`{path}` belongs to another user"
    if status.st_mode & _OTHERS_WRITE:
        return f"others may write to `{path}`"
    return ""
