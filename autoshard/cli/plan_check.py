"""`autoshard plan check`: everything that is wrong with a plan, then one line of facts."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.cli.common import Built, ModelError, build_model, count, print_diagnostics
from autoshard.cli.plan_files import read
from autoshard.diagnostics import AutoshardError, Diagnostic, as_errors
from autoshard.dsl.facts_line import facts_line, launch_line
from autoshard.dsl.load import in_order, load
from autoshard.dsl.resolve import Examined, Resolved, examine
from autoshard.model_facts import ModelFacts
from autoshard.passes._schedules import file_problem
from autoshard.source import Source


@dataclass(frozen=True)
class Result:
    """Hold what was found in one file; `examined` is None when syntax hid a part of it."""

    source: Source
    diagnostics: Sequence[Diagnostic]
    examined: Examined | None


def run(args: argparse.Namespace) -> int:
    """Check every file; 1 when one has errors, which warnings are with `--strict`."""
    built = build_model(args.model) if args.model else None
    facts = model_facts(built) if built else None
    results = [check(read(name), args.sets, facts, args.world) for name in args.files]
    if args.strict:
        results = [_strict(result, built, args) for result in results]
    {"text": _text, "json": _json, "github": _github}[args.format](results, facts, args)
    totals = [count(result.diagnostics) for result in results]
    return 1 if any(errors for errors, _ in totals) else 0


def check(
    source: Source, sets: Sequence[str], facts: ModelFacts | None, world: int | None
) -> Result:
    """Return everything that is wrong with one plan."""
    loaded = load(source, sets)
    if not loaded.complete:
        return Result(source, in_order(loaded.diagnostics), None)
    examined = examine(loaded.plan, facts, world)
    found = [*loaded.diagnostics, *examined.diagnostics]
    if not examined.errors:
        problem = file_problem(examined.resolved)
        found += problem.diagnostics if problem else ()
    return Result(source, in_order(found), examined)


def model_facts(built: Built) -> ModelFacts:
    """Describe the model that `--model` names; this is what needs torch."""
    from autoshard.ir.facts import describe

    return describe(built.model)


def _strict(result: Result, built: Built | None, args: argparse.Namespace) -> Result:
    """Return a result whose warnings are errors; a model is traced for operators without a rule."""
    found = as_errors(result.diagnostics)
    if built is not None and result.examined is not None and not found:
        found = _without_rules(result.examined.resolved, built, args.world)
    return replace(result, diagnostics=found)


def _without_rules(resolved: Resolved, built: Built, world: int | None) -> tuple[Diagnostic, ...]:
    """Return what stops the tensor passes, operators without a placement rule included."""
    from autoshard.frontend import compile_plan

    if built.batch is None:
        raise ModelError(
            "`--strict` traces the model for operators without a placement rule: it needs a batch",
            help="return (model, batch) from what `--model` names, or leave out one of the two",
        )
    try:
        compile_plan(
            built.model,
            resolved.plan,
            built.batch,
            built.loss,
            world_size=world,
            until="tensor",
            strict=True,
        )
    except AutoshardError as error:
        return error.diagnostics
    return ()


def _text(results: list[Result], facts: ModelFacts | None, args: argparse.Namespace) -> None:
    for result in results:
        print_diagnostics(result.diagnostics)
        errors, warnings = count(result.diagnostics)
        name = result.source.name
        if errors:
            print(f"{name}: {errors} error(s), {warnings} warning(s)")
            continue
        assert result.examined is not None  # only errors hide a part of a plan
        for line in _planned(result.examined):
            print(line)
        print(f"{name}: ok{f', {warnings} warning(s)' if warnings else ''}")
        print(facts_line(result.examined.resolved, facts))
        print(launch_line(result.examined.resolved))


def _planned(examined: Examined) -> list[str]:
    places = ((text, span) for text, span in examined.resolved.not_executable)
    shown = [f"{text} (line {span.line})" if span else text for text, span in places]
    return [f"planned, not executable yet: {', '.join(shown)}"] if shown else []


def _json(results: list[Result], facts: ModelFacts | None, args: argparse.Namespace) -> None:
    plans = [_plan_object(result, facts) for result in results]
    print(json.dumps(plans[0] if len(plans) == 1 else plans, indent=2))


def _plan_object(result: Result, facts: ModelFacts | None) -> dict[str, Any]:
    errors, warnings = count(result.diagnostics)
    found: dict[str, Any] = {
        "plan": result.source.name,
        "errors": errors,
        "warnings": warnings,
        "diagnostics": [_diagnostic_object(d) for d in result.diagnostics],
    }
    if result.examined is not None and not errors:
        resolved = result.examined.resolved
        found["mesh"] = {axis.name: axis.size for axis in resolved.mesh.axes}
        found["world_size"] = None if resolved.auto else resolved.mesh.world_size
        found["micro_batch_size"] = resolved.micro_batch_size
        found["num_microbatches"] = resolved.num_microbatches
        found["global_batch_size"] = None if resolved.auto else resolved.global_batch_size
        found["modules_split"] = len(resolved.tensor) if facts else None
        found["not_executable"] = [text for text, _ in resolved.not_executable]
    return found


def _diagnostic_object(diagnostic: Diagnostic) -> dict[str, Any]:
    span = diagnostic.span
    return {
        "code": diagnostic.code,
        "severity": diagnostic.severity.value,
        "message": diagnostic.message,
        "file": span.source.name if span else None,
        "line": span.line if span else None,
        "column": span.column if span else None,
        "length": span.end - span.start if span else None,
        "label": diagnostic.label,
        "help": list(diagnostic.help),
        "notes": list(diagnostic.notes),
    }


def _github(results: list[Result], facts: ModelFacts | None, args: argparse.Namespace) -> None:
    """Print the annotations that GitHub's CI shows beside the lines of a change."""
    for result in results:
        for diagnostic in result.diagnostics:
            print(_annotation(diagnostic))


def _annotation(diagnostic: Diagnostic) -> str:
    lines = [diagnostic.message, diagnostic.label, *diagnostic.help, *diagnostic.notes]
    text = "\n".join(line for line in lines if line)
    for char, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(char, code)
    span = diagnostic.span
    place = f"file={span.source.name},line={span.line},col={span.column}," if span else ""
    return f"::{diagnostic.severity.value} {place}title={diagnostic.code}::{text}"
