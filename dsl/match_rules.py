"""Bind the rules of a block to the modules and parameters of a model; each gets one rule."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from autoshard.diagnostics import Diagnostic, Label, Severity
from autoshard.dsl.foreign import HF_REFUSED, HF_STYLES, left_whole
from autoshard.dsl.globs import Glob
from autoshard.dsl.printer import show_style
from autoshard.dsl.schema import BLOCK
from autoshard.dsl.suggest_paths import Paths
from autoshard.model_facts import ModelFacts
from autoshard.plan import Plan, Rule, Style
from autoshard.source import Span


@dataclass(frozen=True)
class Matched:
    """Hold what each rule matches, which rule each path obeys, and what is wrong."""

    matches: tuple[tuple[Rule, tuple[str, ...]], ...]
    winners: Mapping[str, Rule]
    diagnostics: tuple[Diagnostic, ...]


def match_rules(block: str, rules: Iterable[Rule], paths: Paths | None) -> Matched:
    """Match every rule; without a model, rules are compared by their text alone."""
    found: list[Diagnostic] = []
    matches: list[tuple[Rule, tuple[str, ...]]] = []
    claims: dict[str, list[Rule]] = {}
    for rule in rules:
        glob = Glob(rule.glob)
        matched = paths.match(glob) if paths else (rule.glob,)
        if paths is not None:
            found += _unmatched(rule, glob, matched, paths, needs_weight=block == "tensor")
        matches.append((rule, matched))
        is_first = paths is not None and not any(path in claims for path in matched)
        if rule.mark == "override" and matched and is_first:
            found.append(_overrides_nothing(rule))
        for path in matched:
            claims.setdefault(path, []).append(rule)
    found += _conflicts(block, claims)
    winners = {path: rules[-1] for path, rules in claims.items()}
    return Matched(tuple(matches), winners, tuple(found))


def with_used(plan: Plan, facts: ModelFacts | None) -> tuple[list[Rule], list[Diagnostic]]:
    """Return the tensor rules with those that `use` takes over from the model."""
    rules = list(plan.tensor.rules)
    found: list[Diagnostic] = []
    if facts is None:
        return rules, found
    for use in reversed(plan.tensor.uses):
        taken: list[Rule] = []
        for glob, style in facts.hf_tp_plan.items():
            if why := left_whole(glob, style, facts):
                found.append(_left_whole(glob, style, why, use.span))
            elif style in HF_STYLES:
                name, options = HF_STYLES[style]
                taken.append(Rule(glob, Style(name, dict(options)), "optional", use.span))
            else:
                found.append(_refused(glob, style, use.span))
        if not facts.hf_tp_plan:
            found.append(_no_plan(facts, use.span))
        rules[use.at : use.at] = taken
    return rules, found


def unmatched_path(
    text: str, span: Span | None, paths: Paths, needs_weight: bool = False
) -> Diagnostic | None:
    """Return the message for a path in a setting that matches nothing, None when it does."""
    glob = Glob(text)
    if glob.empty_range or not paths.match(glob):
        return _nothing(glob, span, paths, "path", needs_weight)
    return None


def _unmatched(
    rule: Rule, glob: Glob, matched: tuple[str, ...], paths: Paths, needs_weight: bool
) -> Iterator[Diagnostic]:
    if rule.mark == "optional":
        return
    if not matched:
        yield _nothing(glob, rule.span, paths, "rule", needs_weight)
        return
    for word, alone in glob.alternatives():
        if not paths.match(alone):
            yield Diagnostic(
                "AS214",
                f"`{word}` in this path matches nothing",
                rule.span,
                f"the rest matches {len(matched)}",
                _near(alone, paths, needs_weight),
                severity=Severity.WARNING,
            )


def _nothing(
    glob: Glob, span: Span | None, paths: Paths, what: str, needs_weight: bool
) -> Diagnostic:
    if glob.empty_range:
        message = f"`{glob.empty_range}` is a range without numbers"
        help: tuple[str, ...] = ("the smaller number comes first: `[0..5]`",)
        return Diagnostic("AS211", message, span, "", help)
    help = _near(glob, paths, needs_weight)
    if what == "rule":
        help += ("if it may be absent, write `optional` in front of the rule",)
    return Diagnostic(
        "AS201",
        f"this {what} matches nothing in {paths.facts.class_name}",
        span,
        "no module or parameter has this path",
        help,
        (paths.note(glob),),
    )


def _near(glob: Glob, paths: Paths, needs_weight: bool) -> tuple[str, ...]:
    near = paths.suggestion(glob, needs_weight)
    if near is None:
        return ()
    count = f"{near[1]} match{'es' * (near[1] != 1)}"
    return (f"did you mean `{near[0]}`? ({count})",)


def _conflicts(block: str, claims: Mapping[str, list[Rule]]) -> Iterator[Diagnostic]:
    """Yield one message for each pair of rules that claim the same paths."""
    pairs: dict[tuple[int, int], tuple[Rule, Rule, list[str]]] = {}
    for path, rules in claims.items():
        for first, second in pairwise(rules):
            if second.mark != "override":
                key = (id(first), id(second))
                pairs.setdefault(key, (first, second, []))[2].append(path)
    for first, second, paths in pairs.values():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        spec = BLOCK[block]
        marks = (Label(first.span, f"{show_style(spec, first.style)} here"),) if first.span else ()
        yield Diagnostic(
            "AS203",
            f"two rules claim `{paths[0]}`{more}",
            second.span,
            f"{show_style(spec, second.style)} here",
            ("write `override` in front of the rule that should win, and put it last",),
            (),
            marks if first.span != second.span else (),
        )


def _overrides_nothing(rule: Rule) -> Diagnostic:
    return Diagnostic(
        "AS208",
        "this rule overrides nothing",
        rule.span,
        "no rule before it claims these modules",
        ("remove `override`, or put the rule after the one it should replace",),
        severity=Severity.WARNING,
    )


def _refused(glob: str, style: str, span: Span | None) -> Diagnostic:
    message = f"Hugging Face's style `{style}` has no counterpart here yet"
    help = "write the rules out (`autoshard plan init --from hf`) and then "
    why = HF_REFUSED.get(style, "leave this one out")
    return Diagnostic("AS212", message, span, f"the model gives it to `{glob}`", (help + why,))


def _left_whole(glob: str, style: str, why: str, span: Span | None) -> Diagnostic:
    message = f"Hugging Face's style `{style}` of `{glob}` is not taken over"
    return Diagnostic("AS216", message, span, why, severity=Severity.WARNING)


def _no_plan(facts: ModelFacts, span: Span | None) -> Diagnostic:
    help = ("write its rules by hand: `path: style`",)
    return Diagnostic("AS205", f"{facts.class_name} brings no tp_plan", span, "", help)
