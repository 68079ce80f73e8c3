"""Print a plan as text that reads back as the same plan: what isn't a default, in schema order."""

from collections.abc import Iterator

from autoshard.dsl.nodes import quoted
from autoshard.dsl.schema import SCHEMA, default_of
from autoshard.dsl.specs import BlockSpec
from autoshard.plan import MeshBlock, Plan, Rule, Style


def to_text(plan: Plan) -> str:
    """Return the plan as a file; comments and layout of the file it came from are not kept."""
    blocks = (_block(plan, spec) for spec in SCHEMA)
    return "\n".join(["autoshard 1\n", *(text for text in blocks if text)])


def show_style(block: BlockSpec, style: Style) -> str:
    """Return a style with its options, as a plan writes it."""
    spec = block.style(style.name)
    options = []
    for name, value in style.options.items():
        option = spec.option(name) if spec else None
        options.append(
            name if value is True or option is None else f"{name}={option.kind.show(value)}"
        )
    return f"{style.name}({', '.join(options)})" if options else style.name


def show_setting(block: BlockSpec, name: str, value: object) -> str:
    """Return the value of a setting, as a plan writes it."""
    spec = block.setting(name)
    return spec.kind.show(value) if spec else str(value)


def _block(plan: Plan, spec: BlockSpec) -> str:
    lines = [*_settings(plan, spec), *_rules(plan, spec)]
    body = "".join(f"  {line}\n" for line in lines)
    return f"{spec.name} {{\n{body}}}\n" if lines else ""


def _settings(plan: Plan, spec: BlockSpec) -> Iterator[str]:
    block = getattr(plan, spec.name)
    if isinstance(block, MeshBlock):
        given = list(block.items())
    else:
        given = [(s.name, getattr(block, s.name)) for s in spec.settings]
    given = [(name, value) for name, value in given if value != _default(plan, spec, name)]
    width = max((len(name) for name, _ in given), default=0)
    for name, value in given:
        yield f"{name:<{width}} = {show_setting(spec, name, value)}"


def _default(plan: Plan, spec: BlockSpec, name: str) -> object:
    """Return what a setting is when it isn't given; `compute` then follows `params`."""
    if (spec.name, name) == ("precision", "compute"):
        return plan.precision.params
    return default_of(spec.name, name)


def _rules(plan: Plan, spec: BlockSpec) -> Iterator[str]:
    block = getattr(plan, spec.name)
    rules: tuple[Rule, ...] = getattr(block, "rules", ())
    uses = getattr(block, "uses", ())
    for i, rule in enumerate(rules):
        yield from (f"use {use.name}" for use in uses if use.at == i)
        mark = f"{rule.mark} " if rule.mark else ""
        yield f"{mark}{quoted(rule.glob)}: {show_style(spec, rule.style)}"
    yield from (f"use {use.name}" for use in uses if use.at >= len(rules))
