"""`autoshard plan show`: every rule with the modules it matches, and the layers no rule touches."""

import argparse
from collections.abc import Iterable, Iterator

from autoshard.cli.common import build_model, count, print_diagnostics
from autoshard.cli.plan_check import check, model_facts
from autoshard.cli.plan_files import read
from autoshard.dsl.facts_line import facts_line
from autoshard.dsl.globs import Glob
from autoshard.dsl.printer import show_style
from autoshard.dsl.resolve import Examined
from autoshard.dsl.schema import BLOCK
from autoshard.model_facts import ModelFacts, ModuleFacts
from autoshard.plan import Rule


def run(args: argparse.Namespace) -> int:
    """Print the listing; 1 when the plan has errors, which are printed first."""
    facts = model_facts(build_model(args.model))
    result = check(read(args.file), args.sets, facts, args.world)
    print_diagnostics(result.diagnostics)
    if result.examined is None:
        return 1
    only = Glob(args.glob) if args.glob else None
    for line in listing(result.examined, facts, only):
        print(line)
    errors, _ = count(result.diagnostics)
    return 1 if errors else 0


def listing(examined: Examined, facts: ModelFacts, only: Glob | None = None) -> Iterator[str]:
    """Yield the lines; `only` leaves out the modules that it doesn't match."""
    yield facts_line(examined.resolved, facts)
    for block, matched in examined.matches.items():
        if not matched.matches:
            continue
        yield f"\n{block}"
        for rule, paths in matched.matches:
            shown = [path for path in paths if only is None or only.matches(path)]
            won = [path for path in shown if matched.winners[path] is rule]
            if shown or only is None:
                yield from _rule(block, rule, shown, won, facts)
    untouched = [m for m in _layers(facts) if m.path not in examined.resolved.tensor]
    untouched = [m for m in untouched if only is None or only.matches(m.path)]
    layers = f"layer{'s' * (len(untouched) != 1)} with weights"
    yield f"\nno tensor rule touches {len(untouched)} {layers}"
    for pattern, modules in _folded(untouched):
        yield f"  {pattern}{_times(modules)}  {modules[0].type_name} {_shape(modules[0])}".rstrip()


def _rule(
    block: str, rule: Rule, shown: list[str], won: list[str], facts: ModelFacts
) -> Iterator[str]:
    line = f"line {rule.span.line:>3}  " if rule.span else ""
    mark = f"{rule.mark} " if rule.mark else ""
    style = show_style(BLOCK[block], rule.style)
    lost = len(shown) - len(won)
    note = f", {lost} of them overridden below" if lost else ""
    yield f"  {line}{mark}{rule.glob}: {style}  ({len(shown)} matched{note})"
    modules = [facts.by_path.get(path) or ModuleFacts(path, "parameter") for path in won]
    for pattern, same in _folded(modules):
        yield f"    {pattern}{_times(same)}  {same[0].type_name} {_shape(same[0])}".rstrip()


def _layers(facts: ModelFacts) -> list[ModuleFacts]:
    return [module for module in facts.modules if module.params]


def _folded(modules: Iterable[ModuleFacts]) -> list[tuple[str, list[ModuleFacts]]]:
    """Return modules that differ only in a number as one line: `h.0 .. h.11`."""
    groups: dict[tuple[str, str, str], list[ModuleFacts]] = {}
    for module in modules:
        pattern = ".".join("*" if s.isdecimal() else s for s in module.path.split("."))
        groups.setdefault((pattern, module.type_name, _shape(module)), []).append(module)
    return [
        (pattern if len(same) > 1 else same[0].path, same)
        for (pattern, _, _), same in groups.items()
    ]


def _times(modules: list[ModuleFacts]) -> str:
    return f" x {len(modules)}" if len(modules) > 1 else ""


def _shape(module: ModuleFacts) -> str:
    return str(list(module.weight_shape)) if module.weight_shape else ""
