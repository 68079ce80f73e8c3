"""Measure every transformers family under six layouts and write the coverage page.

    python -m autoshard.testing.coverage --quick
    python -m autoshard.testing.coverage --family llama t5 --json
    python -m autoshard.testing.coverage --cache rows.jsonl --minutes 8 --out docs/coverage.md

A family costs 5 to 20 seconds of CPU. With ``--cache`` rows are kept as they are measured, so that
a long run goes on where it stopped; ``--part 1/2`` and ``--part 2/2`` share one cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from autoshard.testing.coverage.cells import COLUMNS, NAMES, Cell, Row, measure
from autoshard.testing.coverage.families import Family, families
from autoshard.testing.coverage.page import all_equal, render, summary

QUICK = ("gpt2", "llama", "bert", "t5")
LIMIT_S = 240  # of CPU time, for one family


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 where something is wrong or crashed."""
    args = _parser().parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, _out_of_time)
    rows = {(row.family, row.kind): row for row in _cached(args.cache)}
    for row in _measured(args, rows):
        rows[row.family, row.kind] = row
        _keep(args.cache, row)
        if not args.json:
            print(_line(row), flush=True)
    wanted = [rows[f.name, f.kind] for f in _chosen(args) if (f.name, f.kind) in rows]
    if args.out:
        Path(args.out).write_text(render(wanted), encoding="utf-8")
    print(json.dumps(_object(wanted), indent=2) if args.json else _totals(wanted))
    return (
        1 if any(c.status in ("wrong", "crashed") for r in wanted for c in r.cells.values()) else 0
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m autoshard.testing.coverage")
    parser.add_argument("--family", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--out", metavar="FILE", help="write the page")
    parser.add_argument("--cache", metavar="FILE", help="keep rows, take those that are there")
    parser.add_argument("--again", action="store_true", help="measure cached rows once more")
    parser.add_argument("--column", nargs="+", choices=NAMES[1:], help="again, only these columns")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no family after these")
    parser.add_argument(
        "--part", default="1/1", metavar="K/N", help="every Nth family, from the Kth"
    )
    return parser


def _chosen(args: argparse.Namespace) -> list[Family]:
    names = QUICK if args.quick else args.family
    found = [f for f in families() if not names or f.name in names]
    missing = set(names or ()) - {f.name for f in found}
    if missing:
        sys.exit(f"no such family: {', '.join(sorted(missing))}")
    return found


def _measured(args: argparse.Namespace, rows: dict) -> Iterator[Row]:
    part, parts = map(int, args.part.split("/"))
    start = time.monotonic()
    for family in _chosen(args)[part - 1 :: parts]:
        known = rows.get((family.name, family.kind))
        if known is not None and not args.again and not _wants(known, args.column):
            continue
        if time.monotonic() - start > 60 * args.minutes:
            return
        row = _in_time(family, args.column)
        if known and args.column:
            cells = {**known.cells, **row.cells}
            row = replace(row, cells=cells, split=max(known.split, row.split))
        yield row
        gc.collect()


def _wants(row: Row, columns: Sequence[str] | None) -> bool:
    """Tell whether some of these columns of a row that is known aren't equal."""
    cells = (row.cells.get(name) for name in columns or ())
    return bool(row.cells) and any(cell is None or cell.status != "equal" for cell in cells)


def _in_time(family: Family, names: Sequence[str] | None = None) -> Row:
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        return measure(family, tuple(c for c in COLUMNS if not names or c.name in names))
    except _OutOfTime:
        return Row(family.name, family.kind, note=f"not measured within {LIMIT_S} s of CPU time")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class _OutOfTime(BaseException):
    """Say that a family takes too long; no handler of exceptions may take it for a finding."""


def _out_of_time(*_: object) -> None:
    raise _OutOfTime


def _cached(path: str | None) -> Iterator[Row]:
    if path is None or not Path(path).exists():
        return
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        read = json.loads(line)
        cells = {name: Cell(**cell) for name, cell in read["cells"].items()}
        yield Row(**{**read, "cells": cells})


def _keep(path: str | None, row: Row) -> None:
    if path is not None:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def _line(row: Row) -> str:
    if not row.cells:
        return f"{row.kind:8} {row.family:24} not built: {row.note}"
    cells = ", ".join(f"{n}: {row.cells[n].status}" for n in NAMES if n in row.cells)
    return (
        f"{row.kind:8} {row.family:24} {row.cpu_s:5.1f} s  {row.plan:4} {row.split:4.0%}  {cells}"
    )


def _object(rows: Sequence[Row]) -> dict[str, object]:
    measured = [row for row in rows if row.cells]
    return {
        "families": len(measured),
        "all_equal": sum(map(all_equal, measured)),
        "columns": summary(measured),
        "rows": [asdict(row) for row in rows],
    }


def _totals(rows: Sequence[Row]) -> str:
    measured = [row for row in rows if row.cells]
    return f"{len(measured)} families, {sum(map(all_equal, measured))} equal in every column"


if __name__ == "__main__":
    raise SystemExit(main())
