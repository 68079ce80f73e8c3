"""Write proposed splits as plan rules: one rule for all layers that are split alike."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from autoshard.dsl.globs import Glob
from autoshard.dsl.nodes import quoted
from autoshard.dsl.printer import show_style
from autoshard.dsl.schema import BLOCK
from autoshard.model_facts import ModelFacts, Packing, Proposal, Split
from autoshard.plan import Style

LAYERS = ("linear", "conv1d", "embedding")
REASONS = {
    "vocabulary": "the vocabulary: rows of the embedding, columns of the head",
    "attention": "attention: whole heads on each rank",
    "elementwise": "pairs around an elementwise operator",
}


def proposed_rules(facts: ModelFacts, proposal: Proposal) -> Iterator[str]:
    """Yield comments and rules for what a captured graph says of tensor parallelism."""
    styles: dict[str, tuple[str, str]] = {}  # path -> style text, reason
    for split in proposal.splits:
        for path in _paths(facts, split.param):
            text = show_style(BLOCK["tensor"], _told_apart(style_of(split), facts.packed.get(path)))
            styles[path] = (text, split.why)
    for reason, rules in groupby(_grouped(facts, styles), key=lambda rule: rule[2]):
        yield f"# {REASONS.get(reason, reason)}"
        for glob, text, _ in rules:
            yield f"{quoted(glob)}: {text}"
    yield from _left_whole(facts, proposal)


def style_of(split: Split) -> Style:
    """Return the style that a proposed split has in a plan."""
    options: dict[str, object] = {}
    if len(split.parts) > 1:
        equal = len(set(split.parts)) == 1
        options["parts"] = len(split.parts) if equal else split.parts
    if split.pad:
        options["pad"] = split.pad
    return Style(split.style, options)


def _told_apart(style: Style, packing: Packing | None) -> Style:
    """Return a style that says "not packed" where the layer's name says otherwise."""
    is_named_so = packing is not None and packing.layout == "concatenated"
    if style.name != "colwise" or "parts" in style.options or not is_named_so:
        return style
    return Style(style.name, {"parts": 1, **style.options})


def pattern_of(path: str) -> str:
    """Return a path with each number as a star.

    >>> pattern_of("h.0.mlp.up")
    'h.*.mlp.up'
    """
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def _paths(facts: ModelFacts, param: str) -> Iterator[str]:
    """Yield what a rule names for a parameter: its layer, under each of its names, or itself."""
    for name in facts.tied_to(param):
        module, _, leaf = name.rpartition(".")
        holder = facts.by_path.get(module)
        is_layer = leaf == "weight" and holder is not None and holder.kind in LAYERS
        yield module if is_layer else name


def _grouped(
    facts: ModelFacts, styles: Mapping[str, tuple[str, str]]
) -> Iterator[tuple[str, str, str]]:
    """Yield glob, style and reason, by reason; paths that differ in a number are one rule."""
    found, rest = [], list(styles)
    for pattern in (pattern_of, _outer_pattern, str):
        kinds: dict[str, set[tuple[str, str]]] = {}
        for path in rest:
            kinds.setdefault(pattern(path), set()).add(styles[path])
        whole = {
            glob
            for glob, held in kinds.items()
            if len(held) == 1 and sum(pattern(p) == glob for p in rest) == _count(facts, glob, rest)
        }
        found += [(glob, *kinds[glob].pop()) for glob in kinds if glob in whole]
        rest = [path for path in rest if pattern(path) not in whole]
    order = list(REASONS)
    return iter(sorted(found, key=lambda rule: order.index(rule[2])))


def _outer_pattern(path: str) -> str:
    """Return a path with its first number as a star: blocks of a Sequential of Sequentials."""
    parts = path.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join("*" if i == first else part for i, part in enumerate(parts))


def _count(facts: ModelFacts, glob: str, paths: Iterable[str]) -> int:
    """Return how many modules (or parameters, where rules name those) a glob matches."""
    like = next(path for path in paths if Glob(glob).matches(path))
    names: Iterable[str] = facts.by_path if like in facts.by_path else facts.params
    return sum(Glob(glob).matches(name) for name in names)


def _left_whole(facts: ModelFacts, proposal: Proposal) -> Iterator[str]:
    reasons: dict[str, str] = {}
    for whole in proposal.whole:
        for path in _paths(facts, whole.param):
            reasons.setdefault(pattern_of(path), whole.why)
    if reasons:
        yield "# left whole on every rank:"
    for glob, why in reasons.items():
        yield f"#   {glob}: {why}"
