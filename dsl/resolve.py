"""Fit a plan to a model and a number of processes: sizes, batch, and a rule for each module."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autoshard.diagnostics import Diagnostic, NotExecutableError, PlanError, Severity, as_errors
from autoshard.dsl.check_settings import check_settings
from autoshard.dsl.check_shapes import Checker
from autoshard.dsl.executable import not_executable
from autoshard.dsl.fit_mesh import Fitted, fit_batch, fit_mesh
from autoshard.dsl.globs import Glob
from autoshard.dsl.load import in_order
from autoshard.dsl.match_rules import Matched, match_rules, unmatched_path, with_used
from autoshard.dsl.split_target import part_sizes
from autoshard.dsl.suggest_paths import Paths
from autoshard.mesh import Mesh
from autoshard.model_facts import ModelFacts
from autoshard.plan import Plan, Rule, Style
from autoshard.source import Span


@dataclass(frozen=True)
class ResolvedRule:
    """Give one module or parameter its style; Hugging Face names are already translated."""

    path: str  # a module path, or the fully qualified name of a parameter
    style: str
    options: Mapping[str, object]
    rule: Rule


@dataclass(frozen=True)
class Resolved:
    """Hold a plan that fits: every number known, every rule bound to a path of the model."""

    plan: Plan
    mesh: Mesh
    micro_batch_size: int
    num_microbatches: int
    global_batch_size: int
    tensor: Mapping[str, ResolvedRule] = field(default_factory=dict)
    recompute: Mapping[str, ResolvedRule] = field(default_factory=dict)
    warnings: tuple[Diagnostic, ...] = ()
    not_executable: tuple[tuple[str, Span | None], ...] = ()
    auto: str | None = None  # an axis that is `auto` while the number of processes isn't known

    def require_no_warnings(self) -> None:
        """Raise `PlanError` with every warning as an error."""
        if self.warnings:
            raise PlanError(in_order(as_errors(self.warnings)))

    def require_executable(self) -> None:
        """Raise `NotExecutableError` when the plan asks for what this version can't run yet."""
        if self.not_executable:
            raise NotExecutableError(_planned(*planned) for planned in self.not_executable)


@dataclass(frozen=True)
class Examined:
    """Hold a plan as far as it fits, with everything that is wrong or doubtful about it."""

    resolved: Resolved
    diagnostics: tuple[Diagnostic, ...]
    matches: Mapping[str, Matched] = field(default_factory=dict)  # by block

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """Return what is wrong."""
        return tuple(d for d in self.diagnostics if d.severity is Severity.ERROR)


def resolve(plan: Plan, facts: ModelFacts | None = None, world_size: int | None = None) -> Resolved:
    """Fit `plan` to a model and a number of processes, or raise `PlanError` with all that is wrong.

    Without `facts` no rule is looked up; without `world_size` an `auto` axis counts as 1.
    """
    examined = examine(plan, facts, world_size)
    if examined.errors:
        raise PlanError(in_order(examined.errors))
    return examined.resolved


def examine(plan: Plan, facts: ModelFacts | None = None, world_size: int | None = None) -> Examined:
    """Fit `plan` as far as it goes and report everything, without raising."""
    fitted = fit_mesh(plan, world_size)
    batch, found = fit_batch(plan, fitted)
    paths = Paths(facts) if facts else None
    rules, used = with_used(plan, facts)
    matches = {
        "tensor": match_rules("tensor", rules, paths),
        "recompute": match_rules("recompute", plan.recompute.rules, paths),
    }
    diagnostics = [*fitted.diagnostics, *found, *check_settings(plan, fitted), *used]
    for matched in matches.values():
        diagnostics += matched.diagnostics
    if facts is not None and paths is not None:
        diagnostics += Checker(facts, fitted.size("tp")).check(matches["tensor"])
        diagnostics += _setting_paths(plan, paths, fitted)
    warnings = tuple(d for d in diagnostics if d.severity is Severity.WARNING)
    resolved = Resolved(
        plan=plan,
        mesh=fitted.mesh,
        micro_batch_size=batch.micro_batch_size,
        num_microbatches=batch.num_microbatches,
        global_batch_size=batch.global_batch_size,
        tensor=_sized(_bound(matches["tensor"], paths), facts),
        recompute=_bound(matches["recompute"], paths),
        warnings=warnings,
        not_executable=not_executable(plan),
        auto=fitted.auto,
    )
    return Examined(resolved, tuple(diagnostics), matches)


def _bound(matched: Matched, paths: Paths | None) -> dict[str, ResolvedRule]:
    """Return the rule of each path, in the order of the model; nothing without a model."""
    if paths is None:
        return {}
    order = {path: i for i, path in enumerate((*paths.modules, *paths.params))}
    winners = sorted(matched.winners.items(), key=lambda item: order[item[0]])
    return {
        path: ResolvedRule(path, rule.style.name, rule.style.options, rule)
        for path, rule in winners
    }


def _sized(bound: dict[str, ResolvedRule], facts: ModelFacts | None) -> dict[str, ResolvedRule]:
    """Return the rules with `q` and `kv` in their parts as numbers of outputs."""
    return {path: _with_sizes(rule, facts) if facts else rule for path, rule in bound.items()}


def _with_sizes(rule: ResolvedRule, facts: ModelFacts) -> ResolvedRule:
    if not isinstance(rule.options.get("parts"), tuple):
        return rule
    sizes = part_sizes(Style(rule.style, rule.options), 0, facts)
    return rule if sizes is None else replace(rule, options={**rule.options, "parts": sizes})


def _setting_paths(plan: Plan, paths: Paths, fitted: Fitted) -> list[Diagnostic]:
    """Check the paths that stand in settings."""
    units = plan.zero.units
    settings: list[tuple[str, Iterable[str]]] = [
        ("pipeline.split", plan.pipeline.split.args),
        ("zero.units", () if isinstance(units, str) else units),
        ("fuse.only", plan.fuse.only),
    ]
    found: list[Diagnostic] = []
    for place, globs in settings:
        faults = [unmatched_path(glob, plan.span(place), paths) for glob in globs]
        found += [fault for fault in faults if fault is not None]
    return found or _cut_units(plan, paths, fitted)


def _cut_units(plan: Plan, paths: Paths, fitted: Fitted) -> list[Diagnostic]:
    """Check that `even` has a module for each stage, and that `before` names single modules."""
    split, pp = plan.pipeline.split, fitted.size("pp")
    span = plan.span("pipeline.split")
    if split.name == "before":
        many = [glob for glob in split.args if len(paths.match(Glob(glob))) > 1]
        message = "`before` cuts in front of one module each"
        return [
            Diagnostic("AS308", message, span, f"`{g}` matches {len(paths.match(Glob(g)))}")
            for g in many[:1]
        ]
    stages = (pp or 1) * plan.pipeline.virtual_stages
    units = {path for glob in split.args for path in paths.match(Glob(glob))}
    if split.name != "even" or len(units) >= stages:
        return []
    message = f"{len(units)} modules can't make {stages} stages"
    return [Diagnostic("AS308", message, span, "", ("name more modules, or fewer stages",))]


def _planned(text: str, span: Span | None) -> Diagnostic:
    return Diagnostic(
        "AS601",
        f"planned, not executable yet: {text}",
        span,
        "this version can check and inspect it, not run it",
    )
