"""From the tree of a plan file to the plan: words checked, variables, scopes and includes resolved.

What is wrong is reported and left out, so that one run reports everything.
"""

from dataclasses import dataclass, field
from typing import Any

from autoshard.diagnostics import Diagnostic
from autoshard.dsl import wrong_items
from autoshard.dsl.includes import Loader, load_include, read_beside
from autoshard.dsl.parse import parse
from autoshard.dsl.schema import BLOCK, SCHEMA
from autoshard.dsl.specs import BlockSpec
from autoshard.dsl.styles import read_style
from autoshard.dsl.tree import (
    Block,
    DropItem,
    Include,
    Item,
    Let,
    PlanFile,
    RuleItem,
    Scope,
    Setting,
    UseItem,
    Word,
)
from autoshard.dsl.variables import Variables
from autoshard.plan import MeshBlock, Plan, Rule, Use
from autoshard.source import Source, Span


@dataclass(frozen=True)
class Placed:
    """Hold a setting's value with the places of its name and of its value."""

    value: object
    key: Span
    span: Span


@dataclass
class Draft:
    """Collect what the files of one plan say: the included ones first, then the file itself."""

    load: Loader = read_beside
    settings: dict[str, dict[str, Placed]] = field(default_factory=dict)
    rules: dict[str, list[Rule]] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    blocks: dict[str, Span] = field(default_factory=dict)
    keys: dict[str, Span] = field(default_factory=dict)  # of every setting, refused ones too
    variables: Variables = field(default_factory=Variables)
    diagnostics: list[Diagnostic] = field(default_factory=list)

    def add_text(self, source: Source, chain: tuple[Source, ...] = ()) -> None:
        """Parse a file and add what it says; `chain` are the files that include it."""
        parsed = parse(source)
        self.diagnostics += parsed.diagnostics
        self.add_file(parsed.file, (*chain, source))

    def add_file(self, file: PlanFile, chain: tuple[Source, ...]) -> None:
        """Add what a parsed file says. Its own words win over those of the files it includes."""
        for statement in file.statements:
            if isinstance(statement, Include):
                self._include(statement, chain)
        seen: dict[str, Span] = {}
        for statement in file.statements:
            if isinstance(statement, Let):
                self._report(self.variables.define(statement))
            elif isinstance(statement, Block):
                self._block(statement, seen)

    def plan(self) -> Plan:
        """Return the plan that the files make together."""
        spans = self.blocks | self.keys
        for block, settings in self.settings.items():
            for name, placed in settings.items():
                spans[f"{block}.{name}"] = placed.span
        return Plan(**{spec.name: self._filled(spec) for spec in SCHEMA}, spans=spans)

    def _filled(self, spec: BlockSpec) -> Any:
        """Return the dataclass of one block."""
        given: dict[str, Any] = {n: p.value for n, p in self.settings.get(spec.name, {}).items()}
        if spec.name == "mesh":
            return MeshBlock(tuple(given.items()))
        if spec.styles:
            given["rules"] = tuple(self.rules.get(spec.name, ()))
        if spec.name == "tensor":
            given["uses"] = tuple(self.uses)
        return type(getattr(Plan(), spec.name))(**given)

    def _include(self, include: Include, chain: tuple[Source, ...]) -> None:
        source = load_include(include, chain, self.load)
        if isinstance(source, Diagnostic):
            self.diagnostics.append(source)
        else:
            self.add_text(source, chain)

    def _block(self, block: Block, seen: dict[str, Span]) -> None:
        name = block.name.text
        spec = BLOCK.get(name)
        if spec is None:
            self.diagnostics.append(wrong_items.unknown_block(block.name))
            return
        if block.on is not None:
            self.diagnostics.append(wrong_items.reserved_on(block))
        if name in seen:
            self.diagnostics.append(wrong_items.second_block(block, seen[name]))
        seen.setdefault(name, block.name.span)
        self.blocks[name] = seen[name]
        for item in block.items:
            self._item(spec, item, "")

    def _item(self, spec: BlockSpec, item: Item, scope: str) -> None:
        """Add one item; `scope` is the path that stands before those inside a scope."""
        if isinstance(item, Setting):
            self._setting(spec, item, scope)
            return
        fault = wrong_items.misplaced(spec, item, scope)
        if fault is not None:
            self.diagnostics.append(fault)
        elif isinstance(item, Scope):
            for inner in item.items:
                self._item(spec, inner, _join(scope, item.target))
        elif isinstance(item, RuleItem):
            self._rule(spec, item, scope)
        elif isinstance(item, UseItem):
            at = len(self.rules.get(spec.name, ()))
            self.uses.append(Use(item.name.text, at, item.span))
        else:
            self._drop(spec, item, scope)

    def _setting(self, spec: BlockSpec, item: Setting, scope: str) -> None:
        self.keys[f"{spec.name}.{item.key.text}:key"] = item.key.span
        known = spec.setting(item.key.text)
        if known is None or scope:
            self.diagnostics.append(wrong_items.unknown_setting(spec, item, scope))
            return
        node = self.variables.substitute(item.value)
        if isinstance(node, Diagnostic):
            self.diagnostics.append(node)
            return
        value = known.kind.read(known.name, node)
        if isinstance(value, Diagnostic):
            self.diagnostics.append(value)
            return
        before = self.settings.setdefault(spec.name, {}).get(known.name)
        if before is not None and before.key.source is item.span.source:
            self.diagnostics.append(wrong_items.set_twice(item, before.key))
            return
        self.settings[spec.name][known.name] = Placed(value, item.key.span, node.span)

    def _rule(self, spec: BlockSpec, item: RuleItem, scope: str) -> None:
        style, found = read_style(spec, item.style, self.variables)
        self.diagnostics += found
        path = _join(scope, item.target)
        rule = Rule(path, style, item.mark, item.target.span)
        rules = self.rules.setdefault(spec.name, [])
        for i, before in enumerate(rules):
            if before.glob == path and _source(before) is not item.span.source:
                rules[i] = rule  # this file's rule takes the place of the included one
                return
        rules.append(rule)

    def _drop(self, spec: BlockSpec, item: DropItem, scope: str) -> None:
        path = _join(scope, item.target)
        rules = self.rules.setdefault(spec.name, [])
        included = [rule for rule in rules if _source(rule) is not item.span.source]
        if path not in [rule.glob for rule in included]:
            self.diagnostics.append(wrong_items.nothing_to_drop(item, included))
        for i, rule in reversed(list(enumerate(rules))):
            if rule in included and rule.glob == path:
                del rules[i]
                self.uses = [_shifted(use, i) for use in self.uses]

    def _report(self, diagnostic: Diagnostic | None) -> None:
        if diagnostic is not None:
            self.diagnostics.append(diagnostic)


def _join(scope: str, target: Word) -> str:
    return f"{scope}.{target.text}" if scope else target.text


def _source(rule: Rule) -> Source | None:
    return rule.span.source if rule.span else None


def _shifted(use: Use, removed: int) -> Use:
    return Use(use.name, use.at - (removed < use.at), use.span)
