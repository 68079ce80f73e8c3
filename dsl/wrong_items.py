"""The messages about blocks, settings and rules that don't exist or stand in the wrong place."""

from autoshard.diagnostics import Diagnostic, Label
from autoshard.dsl.foreign import HF_STYLES, STAYS_IN_PYTHON, USES
from autoshard.dsl.nodes import written
from autoshard.dsl.schema import BLOCK_SYNONYMS, SCHEMA, home_of, setting_synonyms
from autoshard.dsl.specs import BlockSpec
from autoshard.dsl.suggest import did_you_mean
from autoshard.dsl.tree import Block, DropItem, Item, RuleItem, Scope, Setting, UseItem, Word
from autoshard.plan import Rule
from autoshard.source import Span


def unknown_block(name: Word) -> Diagnostic:
    """Return the message for a block that doesn't exist (AS100)."""
    if name.text in STAYS_IN_PYTHON:
        help: tuple[str, ...] = (STAYS_IN_PYTHON[name.text],)
    else:
        help = did_you_mean(name.text, [block.name for block in SCHEMA], BLOCK_SYNONYMS)
    note = f"blocks: {', '.join(block.name for block in SCHEMA)}"
    return Diagnostic("AS100", f"unknown block `{name.text}`", name.span, "", help, (note,))


def second_block(block: Block, first: Span) -> Diagnostic:
    """Return the message for a block that a file holds twice (AS102)."""
    return Diagnostic(
        "AS102",
        f"a second `{block.name.text}` block",
        block.name.span,
        "merge it into the first",
        secondary=(Label(first, "first block"),),
    )


def reserved_on(block: Block) -> Diagnostic:
    """Return the message for `block on something` (AS107)."""
    return Diagnostic(
        "AS107",
        f"`{block.name.text} on ...` is reserved for later versions",
        block.on.span if block.on else block.name.span,
        help=(f"write `{block.name.text} {{ ... }}`",),
    )


def set_twice(item: Setting, first: Span) -> Diagnostic:
    """Return the message for a setting that a file gives twice (AS103)."""
    return Diagnostic(
        "AS103",
        f"`{item.key.text}` is set twice",
        item.key.span,
        "remove one of the two",
        secondary=(Label(first, "first set here"),),
    )


def unknown_setting(spec: BlockSpec, item: Setting, scope: str) -> Diagnostic:
    """Return the message for an unknown setting (AS101), or one meant as a rule (AS104)."""
    key = item.key.text
    if spec.styles and (scope or _looks_like_rule(spec, item)):
        return Diagnostic(
            "AS104",
            f"`{key}` is a path: a rule needs `:`, `=` is for settings",
            item.key.span,
            help=(f"write `{key}: {written(item.value)}`",),
        )
    home = home_of(key, spec)
    near = did_you_mean(key, [setting.name for setting in spec.settings], setting_synonyms(spec))
    if key in STAYS_IN_PYTHON and key not in setting_synonyms(spec):
        near = (STAYS_IN_PYTHON[key],)
    elif home is not None and not near:
        near = (f"`{home}` has this setting: write it in `{home} {{ ... }}`",)
    note = f"`{spec.name}` knows: {', '.join(setting.name for setting in spec.settings)}"
    message = f"unknown setting `{key}` in `{spec.name}`"
    return Diagnostic("AS101", message, item.key.span, "", near, (note,))


def misplaced(spec: BlockSpec, item: Item, scope: str) -> Diagnostic | None:
    """Return what is wrong with the place of a rule, scope, use or drop; None when it is fine."""
    target = item.target if isinstance(item, RuleItem | Scope | DropItem) else None
    if isinstance(item, RuleItem) and not scope and spec.setting(item.target.text):
        return Diagnostic(
            "AS105",
            f"`{item.target.text}` is a setting: it needs `=`",
            item.target.span,
            help=(f"write `{item.target.text} = {written(item.style)}`",),
        )
    if isinstance(item, UseItem):
        return _wrong_use(spec, item, scope)
    if spec.styles or target is None:
        return None
    if isinstance(item, Scope) and target.text in [block.name for block in SCHEMA]:
        help = (f"close `{spec.name}` with `}}` before `{target.text}`",)
        message = f"the block `{target.text}` stands inside `{spec.name}`"
        return Diagnostic("AS106", message, target.span, "", help)
    note = f"`{spec.name}` knows: {', '.join(setting.name for setting in spec.settings)}"
    message = f"`{spec.name}` holds settings, not rules"
    help = ("a setting is written `name = value`",)
    return Diagnostic("AS106", message, target.span, "", help, (note,))


def nothing_to_drop(item: DropItem, included: list[Rule]) -> Diagnostic:
    """Return the message for a `drop` that no included rule answers (AS209)."""
    globs = [rule.glob for rule in included]
    help = did_you_mean(item.target.text, globs) or ("`drop` forgets a rule of an included file",)
    return Diagnostic("AS209", "no included rule has this path", item.target.span, "", help)


def _wrong_use(spec: BlockSpec, item: UseItem, scope: str) -> Diagnostic | None:
    if spec.name != "tensor" or scope:
        message = "`use` stands directly in `tensor`"
        return Diagnostic("AS106", message, item.span, "", ("move it there",))
    if item.name.text in USES:
        return None
    help = (*did_you_mean(item.name.text, USES), f"one of: {', '.join(USES)}")
    return Diagnostic("AS213", f"can't use `{item.name.text}`", item.name.span, "", help)


def _looks_like_rule(spec: BlockSpec, item: Setting) -> bool:
    styles = {style.name for style in spec.styles} | set(HF_STYLES)
    named = getattr(item.value, "name", getattr(item.value, "text", ""))
    return "." in item.key.text or "*" in item.key.text or named in styles
