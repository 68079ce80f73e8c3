"""The shape of the schema: what a block, a setting, a style and an option are described by."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from autoshard.dsl.values import Kind


@dataclass(frozen=True)
class SettingSpec:
    """Describe one setting of a block, or one option of a style.

    `executable` may list the values that run, as they are written (a call by its name alone).
    """

    name: str
    kind: Kind
    doc: str
    executable: bool | tuple[str, ...] = True
    synonyms: tuple[str, ...] = ()  # what other systems call it


@dataclass(frozen=True)
class StyleSpec:
    """Describe one style of a rule."""

    name: str
    doc: str
    options: tuple[SettingSpec, ...] = ()
    executable: bool = True
    synonyms: tuple[str, ...] = ()

    def option(self, name: str) -> SettingSpec | None:
        """Return an option by its name."""
        return _named(self.options, name)


@dataclass(frozen=True)
class BlockSpec:
    """Describe one block; it takes rules when it has styles."""

    name: str
    doc: str
    settings: tuple[SettingSpec, ...]
    styles: tuple[StyleSpec, ...] = ()
    synonyms: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # for the reference page

    def setting(self, name: str) -> SettingSpec | None:
        """Return a setting by its name."""
        return _named(self.settings, name)

    def style(self, name: str) -> StyleSpec | None:
        """Return a style by its name."""
        return _named(self.styles, name)


def _named(specs: Iterable[Any], name: str) -> Any:
    return next((spec for spec in specs if spec.name == name), None)


@dataclass(frozen=True)
class Page:
    """Explain one code; `wrong` and `right` are lines of a plan, either may be empty."""

    title: str
    text: str
    wrong: str = ""
    right: str = ""
