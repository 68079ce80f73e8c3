"""The syntax tree of a plan file: what was written, in order, with its places.

Spans take no part in comparison: two trees are equal when they say the same in the same order.
"""

from dataclasses import dataclass, field
from typing import Literal

from autoshard.source import Source, Span


@dataclass(frozen=True)
class Word:
    """Hold a name or a module path: `colwise`, `transformer.h.*`."""

    text: str
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True)
class Quantity:
    """Hold what begins with a digit: `4`, `500MB`, `1f1b`."""

    text: str
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True)
class String:
    """Hold quoted text, without its quotes."""

    text: str
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True)
class Variable:
    """Hold `$name`, without the dollar."""

    text: str
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True)
class ListValue:
    """Hold `[a, b]`."""

    items: tuple["Value", ...]
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True)
class Argument:
    """Hold one argument of a call or a style; `name` is None when only a value is given."""

    name: Word | None
    value: "Value"
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True)
class CallValue:
    """Hold `even(a, b)`, and a style with its options; `span` marks the name alone."""

    name: str
    args: tuple[Argument, ...]
    span: Span = field(compare=False, repr=False)


Value = Word | Quantity | String | Variable | ListValue | CallValue


@dataclass(frozen=True)
class Setting:
    """Hold `key = value`."""

    key: Word
    value: Value
    span: Span = field(compare=False, repr=False)


Mark = Literal["", "override", "optional"]


@dataclass(frozen=True)
class RuleItem:
    """Hold `[override|optional] path: style`."""

    mark: Mark
    target: Word
    style: CallValue
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True)
class Scope:
    """Hold `path { items }`: every path inside begins with this one."""

    target: Word
    items: tuple["Item", ...]
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True)
class UseItem:
    """Hold `use transformers.tp_plan`."""

    name: Word
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True)
class DropItem:
    """Hold `drop path`."""

    target: Word
    span: Span = field(compare=False, repr=False)


Item = Setting | RuleItem | Scope | UseItem | DropItem


@dataclass(frozen=True)
class Block:
    """Hold `name { items }`; `on` is reserved for later versions."""

    name: Word
    on: Word | None
    items: tuple[Item, ...]
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True)
class Include:
    """Hold `include "file.plan"`."""

    path: String
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True)
class Let:
    """Hold `let name = value`."""

    name: Word
    value: Value
    span: Span = field(compare=False, repr=False)


Statement = Block | Include | Let


@dataclass(frozen=True)
class PlanFile:
    """Hold one file: its language version, its statements, and the comments between them."""

    version: str
    statements: tuple[Statement, ...]
    source: Source = field(compare=False, repr=False)
    header: Span = field(compare=False, repr=False)
    comments: tuple[Span, ...] = field(default=(), compare=False, repr=False)
