"""List what a plan asks for that this version can't run yet."""

from collections.abc import Iterator

from autoshard.dsl.printer import show_setting, show_style
from autoshard.dsl.schema import SCHEMA
from autoshard.dsl.specs import BlockSpec, SettingSpec
from autoshard.plan import Call, MeshBlock, Plan, Rule, Style
from autoshard.source import Span

Planned = tuple[str, Span | None]


def not_executable(plan: Plan) -> tuple[Planned, ...]:
    """Return each such setting, style or option as text with its place, each once."""
    found: dict[str, Span | None] = {}
    for spec in SCHEMA:
        for text, span in (*_settings(plan, spec), *_rules(plan, spec)):
            found.setdefault(text, span)
    return tuple(found.items())


def _settings(plan: Plan, spec: BlockSpec) -> Iterator[Planned]:
    block = getattr(plan, spec.name)
    for setting in spec.settings:
        is_mesh = isinstance(block, MeshBlock)
        value = block.get(setting.name) if is_mesh else getattr(block, setting.name)
        if value is None or value == () or _runs(setting, value):
            continue
        place = f"{spec.name}.{setting.name}"
        if place == "precision.compute" and not plan.span(place) and value == block.params:
            continue  # it only follows `params`, which is named already
        text = f"{place} = {show_setting(spec, setting.name, value)}"
        yield text, plan.key_span(place)


def _runs(setting: SettingSpec, value: object) -> bool:
    if isinstance(setting.executable, bool):
        return setting.executable
    shown = value.name if isinstance(value, Call) else setting.kind.show(value)
    return shown in setting.executable


def _rules(plan: Plan, spec: BlockSpec) -> Iterator[Planned]:
    rules: tuple[Rule, ...] = getattr(getattr(plan, spec.name), "rules", ())
    for rule in rules:
        style = spec.style(rule.style.name)
        if style is None:
            continue
        if not style.executable:
            yield f"{spec.name} style `{style.name}`", rule.span
            continue
        for name, value in rule.style.options.items():
            option = style.option(name)
            if option is not None and not _runs(option, value):
                text = show_style(spec, Style(style.name, {name: value}))
                yield f"{spec.name} style `{text}`", rule.span
