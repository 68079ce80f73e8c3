"""Numbers with units: bytes, elements, bandwidths; how they are read and how they print."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

# Decimal and binary multiples of a byte. Lower-case `b` (bits) is left out on purpose.
BYTES = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
ELEMENTS = {"elems": 1, "kelems": 10**3, "Kelems": 10**3, "Melems": 10**6, "Gelems": 10**9}
# Links are quoted in bytes per second or, by network people, in bits per second.
BANDWIDTHS = {f"{unit}/s": Fraction(count) for unit, count in BYTES.items()} | {
    f"{unit}bit/s": Fraction(count, 8) for unit, count in (("M", 10**6), ("G", 10**9))
}

_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)(.*)")
_BINARY = ("TiB", "GiB", "MiB", "KiB")
_DECIMAL = ("TB", "GB", "MB", "kB", "B")


@dataclass(frozen=True)
class Size:
    """Hold an amount of storage: so many bytes, or so many elements of whatever type."""

    count: int
    unit: Literal["bytes", "elements"] = "bytes"

    def bytes(self, itemsize: int) -> int:
        """Return the amount in bytes for elements of `itemsize` bytes each."""
        return self.count if self.unit == "bytes" else self.count * itemsize

    def __str__(self) -> str:
        """Return the shortest exact text that reads back as this size."""
        if self.unit == "elements":
            return _exact(self.count, ELEMENTS, ("Gelems", "Melems", "kelems", "elems"))
        texts = (_exact(self.count, BYTES, order) for order in ((*_BINARY, "B"), _DECIMAL))
        return min(texts, key=len)


def split_number(text: str) -> tuple[Fraction, str] | None:
    """Split `500MB` into its exact number and its unit, or return None when it has no number."""
    match = _NUMBER.fullmatch(text)
    return (Fraction(match[1]), match[2]) if match else None


def read_size(text: str) -> Size | None:
    """Read `25MiB` or `500Melems`; None when the unit is missing or unknown, or it isn't whole."""
    split = split_number(text)
    if split is None:
        return None
    number, unit = split
    if unit in BYTES:
        return _whole(number * BYTES[unit], "bytes")
    if unit in ELEMENTS:
        return _whole(number * ELEMENTS[unit], "elements")
    return None


def read_bandwidth(text: str) -> float | None:
    """Read `300GB/s` or `400Gbit/s` as bytes per second; None when the unit isn't one."""
    split = split_number(text)
    if split is None or split[1] not in BANDWIDTHS:
        return None
    return float(split[0] * BANDWIDTHS[split[1]])


def show_bandwidth(bytes_per_s: float) -> str:
    """Return the shortest exact text that reads back as this bandwidth."""
    number = Fraction(bytes_per_s)
    for unit in ("TB", "GB", "MB", "kB"):
        scaled = number / BYTES[unit]
        if scaled >= 1 and scaled.denominator == 1:
            return f"{scaled}{unit}/s"
    return f"{float(number)!r}B/s".replace(".0B", "B")


def show_bytes(count: float) -> str:
    """Return bytes as people read them, to three digits: `1.50 GiB`."""
    for unit in _BINARY:
        if count >= BYTES[unit]:
            return f"{count / BYTES[unit]:.3g} {unit}"
    return f"{count:.0f} B"


def show_count(count: float) -> str:
    """Return a count as people read it: `124.4 M`, `176.2 B`."""
    for limit, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if count >= limit:
            return f"{count / limit:.1f}{unit}"
    return f"{count:g}"


def _whole(number: Fraction, unit: Literal["bytes", "elements"]) -> Size | None:
    return Size(int(number), unit) if number.denominator == 1 else None


def _exact(count: int, table: dict[str, int], order: tuple[str, ...]) -> str:
    fits = (unit for unit in order if count % table[unit] == 0 and count >= table[unit])
    unit = next(fits, order[-1])
    return f"{count // table[unit]}{unit}"


def divisors(number: int, most: int = 12) -> list[int]:
    """Return the divisors of a number in order, at most so many: those that people would try."""
    if number > 10**9:
        return []
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})[:most]
