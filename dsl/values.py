"""The kinds of values that settings and options take: how each is read, shown and described.

A kind reads a node of the tree and returns the value, or the diagnostic that says what is wrong.
`read(name, show(value))` gives the value back.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, Protocol

from autoshard.diagnostics import Diagnostic
from autoshard.dsl.nodes import text_of, wrong, wrong_word
from autoshard.dsl.suggest import did_you_mean
from autoshard.dsl.tree import Quantity, Value, Word
from autoshard.units import (
    BANDWIDTHS,
    BYTES,
    ELEMENTS,
    Size,
    read_bandwidth,
    show_bandwidth,
    split_number,
)

LIMIT = 2**63  # no count, no size is larger


class Kind(Protocol):
    """Read, show and describe one kind of value."""

    @property
    def words(self) -> tuple[str, ...]:
        """Return the words that stand for themselves."""

    def read(self, name: str, node: Value) -> object:
        """Return the value of `node`, or a `Diagnostic` that calls the setting `name`."""

    def show(self, value: Any) -> str:
        """Return text that reads back as `value`."""

    def describe(self) -> str:
        """Return what may be written, in a few words."""


@dataclass(frozen=True)
class Integer:
    """A whole number within bounds, or one of some words."""

    minimum: int = 1
    maximum: int = LIMIT
    words: tuple[str, ...] = ()

    def read(self, name: str, node: Value) -> object:
        """Return the number, or the word."""
        text = text_of(node)
        if isinstance(node, Word) and text in self.words:
            return text
        if not isinstance(node, Quantity) or not text.isdecimal():
            return wrong(node, "AS120", f"`{name}` needs {self.describe()}", _not_whole(text))
        if len(text) < 20 and self.minimum <= int(text) <= self.maximum:
            return int(text)
        return wrong(node, "AS123", f"`{name}` can't be {text}", f"needs {self._bounds(text)}")

    def show(self, value: Any) -> str:
        """Return the digits, or the word."""
        return str(value)

    def describe(self) -> str:
        """Return the bounds in words."""
        words = "".join(f" or `{word}`" for word in self.words)
        if self.maximum < LIMIT:
            return f"a whole number from {self.minimum} to {self.maximum}{words}"
        least = f" of at least {self.minimum}" if self.minimum > 1 else ""
        return f"a whole number{least}{' (0 too)' if self.minimum == 0 else ''}{words}"

    def _bounds(self, text: str) -> str:
        """Return what may be written instead of a whole number out of bounds."""
        if self.maximum < LIMIT:
            return self.describe()
        words = "".join(f" or `{word}`" for word in self.words)
        is_small = len(text) < 20 and int(text) < self.minimum
        bound = f"at least {self.minimum}" if is_small else f"at most {self.maximum}"
        return f"a whole number of {bound}{words}"


@dataclass(frozen=True)
class Enum:
    """One of some words; `synonyms` maps other systems' words to ours."""

    words: tuple[str, ...]
    synonyms: tuple[tuple[str, str], ...] = ()

    def read(self, name: str, node: Value) -> object:
        """Return the word."""
        text = text_of(node)
        if isinstance(node, Word | Quantity) and text in self.words:
            return text
        return wrong_word(name, node, self.words, dict(self.synonyms))

    def show(self, value: Any) -> str:
        """Return the word."""
        return str(value)

    def describe(self) -> str:
        """Return the words."""
        return " | ".join(self.words)


@dataclass(frozen=True)
class OnOff:
    """A switch."""

    words: tuple[str, ...] = ("off", "on")

    def read(self, name: str, node: Value) -> object:
        """Return True for on."""
        if isinstance(node, Word) and node.text in self.words:
            return node.text == "on"
        yes = dict.fromkeys(("true", "True", "yes", "1"), "on")
        no = dict.fromkeys(("false", "False", "no", "none", "0"), "off")
        return wrong_word(name, node, self.words, yes | no)

    def show(self, value: Any) -> str:
        """Return the word."""
        return self.words[bool(value)]

    def describe(self) -> str:
        """Return the words."""
        return "on | off"


@dataclass(frozen=True)
class Flag:
    """An option that is given by its name alone: `colwise(gather)`."""

    words: tuple[str, ...] = ()

    def read(self, name: str, node: Value) -> object:
        """Return True for `on`, False for `off`; a name without a value never comes here."""
        return OnOff().read(name, node)

    def show(self, value: Any) -> str:
        """Return the word that reads back."""
        return OnOff().show(value)

    def describe(self) -> str:
        """Return how it is written."""
        return "given by its name"


@dataclass(frozen=True)
class Bytes:
    """An amount of storage with its unit; `elements` allows counting elements of any type.

    `like` names the setting of DeepSpeed that counts elements without saying so.
    """

    elements: bool = True
    percent: bool = False
    like: str = ""
    words: tuple[str, ...] = ()

    def read(self, name: str, node: Value) -> object:
        """Return a `Size`, or a float between 0 and 1 for a percentage."""
        split = split_number(text_of(node)) if isinstance(node, Quantity) else None
        if split is None:
            return wrong(node, "AS120", f"`{name}` needs {self.describe()}")
        number, unit = split
        if unit == "%" and self.percent:
            return _percentage(name, node, number)
        table = BYTES | (ELEMENTS if self.elements else {})
        if not unit:
            return self._no_unit(name, node, number)
        if unit not in table:
            close = {unit.lower(): unit for unit in table}.get(unit.lower())
            help = did_you_mean(unit, (), {unit: close} if close else None)
            units = ", ".join(unit for unit in table if unit not in ("KB", "Kelems"))
            label = f"`{unit}` is no unit of storage"
            return wrong(node, "AS121", f"`{name}` needs a unit", label, help, (f"units: {units}",))
        return _size(name, node, number * table[unit], "bytes" if unit in BYTES else "elements")

    def _no_unit(self, name: str, node: Value, number: Fraction) -> Diagnostic:
        if not self.elements or number < 10**5 or number.denominator != 1 or number > 10**15:
            short = f"{number.numerator}" if number.denominator == 1 else f"{float(number):g}"
            example = f"write `{short}MB`, `{short}GB` or another unit"
            label = "bytes or elements?" if self.elements else "of what?"
            return wrong(node, "AS121", f"`{name}` needs a unit", label, (example,))
        as_bytes, as_elements = Size(2 * int(number)), Size(int(number), "elements")
        note = f"DeepSpeed's {self.like} counts elements: its {text_of(node)} is {as_bytes} in bf16"
        return wrong(
            node,
            "AS121",
            f"`{name}` needs a unit",
            "bytes or elements?",
            (f"write bytes (`{as_bytes}`) or elements (`{as_elements}`)",),
            (note,) if self.like else (),
        )

    def show(self, value: Any) -> str:
        """Return the size with its unit."""
        if isinstance(value, float):
            return f"{_decimal(Fraction(value) * 100)}%"
        return str(value)

    def describe(self) -> str:
        """Return the forms."""
        forms = "bytes with a unit (`64MiB`)"
        forms += ", or elements (`500Melems`)" if self.elements else ""
        return forms + (", or a percentage" if self.percent else "")


@dataclass(frozen=True)
class Bandwidth:
    """The speed of a link, in bytes per second."""

    words: tuple[str, ...] = ()

    def read(self, name: str, node: Value) -> object:
        """Return bytes per second."""
        value = read_bandwidth(text_of(node)) if isinstance(node, Quantity) else None
        if value is not None and 0 < value < LIMIT:
            return value
        help = (f"units: {', '.join(unit for unit in BANDWIDTHS if unit != 'KB/s')}",)
        return wrong(node, "AS121", f"`{name}` needs {self.describe()}", "", help)

    def show(self, value: Any) -> str:
        """Return the bandwidth with its unit."""
        return show_bandwidth(value)

    def describe(self) -> str:
        """Return the form."""
        return "a bandwidth (`300GB/s`, `400Gbit/s`)"


@dataclass(frozen=True)
class LossScale:
    """A fixed number, or `dynamic`."""

    words: tuple[str, ...] = ("dynamic",)

    def read(self, name: str, node: Value) -> object:
        """Return the number, or the word."""
        if isinstance(node, Word) and node.text in self.words:
            return node.text
        split = split_number(text_of(node)) if isinstance(node, Quantity) else None
        if split is not None and not split[1] and 0 < split[0] < LIMIT:
            return float(split[0])
        return wrong(node, "AS120", f"`{name}` needs {self.describe()}")

    def show(self, value: Any) -> str:
        """Return the number without a needless `.0`."""
        return value if isinstance(value, str) else _decimal(Fraction(value))

    def describe(self) -> str:
        """Return the forms."""
        return "a number above 0, or `dynamic`"


def _not_whole(text: str) -> str:
    return "this is a word" if text and not text[0].isdigit() else ""


def _percentage(name: str, node: Value, number: Fraction) -> object:
    if 0 <= number <= 100:
        return float(number / 100)
    return wrong(node, "AS123", f"`{name}` can't be {text_of(node)}", "0% to 100%")


def _size(name: str, node: Value, count: Fraction, unit: Literal["bytes", "elements"]) -> object:
    if count.denominator != 1 or count >= LIMIT:
        label = "not a whole number of them" if count < LIMIT else "larger than any memory"
        return wrong(node, "AS123", f"`{name}` can't be {text_of(node)}", label)
    return Size(int(count), unit)


def _decimal(number: Fraction) -> str:
    """Return a number in digits that read back exactly."""
    return str(number.numerator) if number.denominator == 1 else repr(float(number))
