"""`autoshard cache`: the programs that were kept on disk, and how to be rid of them."""

from __future__ import annotations

import argparse
import json
import time

from autoshard.cache.store import MOST_BYTES, VARIABLE, Store, default_folder
from autoshard.cli.common import add_common
from autoshard.units import show_bytes

_DAY = 24 * 3600


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command."""
    parser = subparsers.add_parser("cache", help="list or clear the programs kept on disk")
    parser.add_argument("--clear", action="store_true", help="remove all of them")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one line an entry, the one longest unused first, or what was removed."""
    folder = default_folder()
    if folder is None:
        print(json.dumps({"folder": None}) if args.json else f"off: {VARIABLE} says so")
        return 0
    store = Store(folder)
    if args.clear:
        count, removed = store.clear()
        found = {"folder": str(folder), "removed": count, "bytes": removed}
        print(json.dumps(found) if args.json else f"{count} files removed, {show_bytes(removed)}")
        return 0
    entries = _entries(store)
    if args.json:
        print(json.dumps({"folder": str(folder), "entries": entries}))
        return 0
    for entry in entries:
        size = show_bytes(entry["bytes"])
        made = f"compiled in {entry['seconds']:.1f} s, unused for {entry['days']:.1f} days"
        print(f"{entry['model']:<32} {size:>9}  {made}  {entry['file']}")
    total = show_bytes(sum(entry["bytes"] for entry in entries))
    print(f"{len(entries)} programs, {total} of at most {show_bytes(MOST_BYTES)} in {folder}")
    return 0


def _entries(store: Store) -> list[dict]:
    now = time.time()
    return [
        {
            "model": head["label"],
            "file": path.name,
            "bytes": path.stat().st_size,
            "seconds": head["facts"].get("seconds", 0.0),
            "checks": head["facts"].get("checks", []),
            "days": (now - path.stat().st_mtime) / _DAY,
        }
        for path, head in store.heads()
    ]
