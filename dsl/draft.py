"""Draft a plan: rules found in the captured graph, or taken from Hugging Face's tp_plan.

Where a model can't be captured they are guessed from the names and shapes of its layers. It is a
draft to start from, not a search: people review it, `plan check` checks it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.dsl.draft_rules import pattern_of, proposed_rules
from autoshard.dsl.foreign import HF_REFUSED, HF_STYLES, left_whole
from autoshard.dsl.globs import Glob
from autoshard.dsl.nodes import quoted
from autoshard.dsl.printer import show_style
from autoshard.dsl.schema import BLOCK
from autoshard.model_facts import ModelFacts, ModuleFacts, Proposal
from autoshard.plan import Style
from autoshard.units import show_count

LAYERS = ("linear", "conv1d")
TP_SIZES = (8, 4, 2, 1)  # at most the ranks of one machine, by custom
BYTES_PER_PARAM = 16  # weights, gradients and AdamW's state in float32
FITS = 40 * 2**30  # bytes of these on one device: half of a common one, the rest is activations
IN_FLIGHT = 4  # micro-batches for each stage, so that the bubble is small
UNKNOWN = "no counterpart here yet"
ZERO = "zero { stage = 1 }  # share the optimizer's state over dp"


@dataclass(frozen=True)
class Degrees:
    """Hold how many ranks each axis gets; dp is `auto` while the processes aren't counted."""

    tp: int
    pp: int = 1
    dp: int | str = 1


def draft(
    facts: ModelFacts,
    world_size: int | None,
    origin: str,
    proposal: Proposal | None = None,
    samples: int = 1,
    note: str = "",
) -> str:
    """Return plan text; `origin` is `shapes` or `hf`.

    `proposal` is what the captured graph says (for `shapes`), `samples` the rows of the example
    batch, `note` a line to put at the top.
    """
    degrees = choose_degrees(facts, world_size)
    if origin == "hf":
        rules = list(_hf_rules(facts))
    elif proposal is not None:
        rules = list(proposed_rules(facts, proposal))
    else:
        rules = list(_guessed(facts, degrees.tp))
    micro = 1 if degrees.pp == 1 else IN_FLIGHT * degrees.pp
    return "\n".join(
        [
            "autoshard 1",
            f"# {facts.class_name}, {show_count(facts.num_params)} parameters: a draft to edit.",
            *([f"# {note}"] if note else []),
            "",
            _mesh(degrees),
            "",
            f"batch {{ micro_batch_size = {samples}, num_microbatches = {micro} }}",
            "",
            *(["tensor {", *(f"  {rule}" for rule in rules), "}", ""] if rules else []),
            *([_pipeline(facts), ""] if degrees.pp > 1 else []),
            *([ZERO, ""] if degrees.dp != 1 else []),
        ]
    )


def choose_degrees(facts: ModelFacts, world_size: int | None) -> Degrees:
    """Return how to use the processes: tp within a machine, pp where that isn't enough, dp else.

    tp is the largest size that divides heads and processes; pp grows until a rank's part of the
    model fits, at most one stage a block.
    """
    tp = _tp(facts, world_size)
    if world_size is None:
        return Degrees(tp, 1, "auto")
    rest, pp = world_size // tp, 1
    blocks = max((count for _, count in blocks_of(facts)), default=1)
    while facts.num_params * BYTES_PER_PARAM / (tp * pp) > FITS:
        larger = next((n for n in range(pp + 1, rest + 1) if rest % n == 0), pp)
        if larger == pp or larger > blocks:
            break
        pp = larger
    return Degrees(tp, pp, rest // pp)


def blocks_of(facts: ModelFacts) -> list[tuple[str, int]]:
    """Return a glob and a count for each list of blocks that is in no other one."""
    found: dict[str, int] = {}
    for path in facts.by_path:
        head, _, last = path.rpartition(".")
        if last.isdecimal() and not any(part.isdecimal() for part in head.split(".")):
            glob = f"{head}.*" if head else "*"
            found[glob] = found.get(glob, 0) + 1
    return [(glob, count) for glob, count in found.items() if count > 1]


def _mesh(degrees: Degrees) -> str:
    pp = f"pp = {degrees.pp}, " if degrees.pp > 1 else ""
    return f"mesh {{ {pp}dp = {degrees.dp}, tp = {degrees.tp} }}"


def _pipeline(facts: ModelFacts) -> str:
    globs = ", ".join(quoted(glob) for glob, _ in blocks_of(facts))
    return f"pipeline {{ split = even({globs}), schedule = 1f1b }}"


def _tp(facts: ModelFacts, world_size: int | None) -> int:
    """Return the largest size that divides the heads and, where it is known, the processes."""
    heads = facts.num_kv_heads or facts.num_heads or 1
    fits = (n for n in TP_SIZES if heads % n == 0 and (world_size or n) % n == 0)
    return next(fits)


def _hf_rules(facts: ModelFacts) -> Iterator[str]:
    for glob, name in facts.hf_tp_plan.items():
        why = left_whole(glob, name, facts) or HF_REFUSED.get(name, "")
        if why or name not in HF_STYLES:
            yield f"# {glob}: {name}: {why or UNKNOWN}"
            continue
        style, options = HF_STYLES[name]
        matched = any(Glob(glob).matches(path) for path in (*facts.by_path, *facts.params))
        rule = f"{quoted(glob)}: {show_style(BLOCK['tensor'], Style(style, options))}"
        yield rule if matched else f"optional {rule}"


def _guessed(facts: ModelFacts, tp: int) -> Iterator[str]:
    """Yield one rule for each kind of layer, layers that differ in a number as one."""
    rules: dict[str, str] = {}
    for module in facts.modules:
        style = _style(facts, module, tp)
        if style is not None:
            rules.setdefault(pattern_of(module.path), show_style(BLOCK["tensor"], style))
    return (f"{quoted(pattern)}: {style}" for pattern, style in rules.items())


def _style(facts: ModelFacts, module: ModuleFacts, tp: int) -> Style | None:
    """Return the style that Megatron's scheme gives a layer, None for one that stays whole."""
    if module.kind == "embedding" or _is_head(facts, module):
        return _vocab_style(facts, module, tp)
    if module.kind not in LAYERS:
        return None
    packing = facts.packed.get(module.path)
    if packing is not None and packing.layout == "concatenated":
        equal = len(set(packing.parts)) == 1
        return Style("colwise", {"parts": len(packing.parts) if equal else ("q", "kv", "kv")})
    if packing is not None or module.path in facts.projections:
        return Style("colwise")
    return _by_siblings(facts, module)


def _vocab_style(facts: ModelFacts, module: ModuleFacts, tp: int) -> Style | None:
    rows = module.in_features if module.kind == "embedding" else module.out_features
    largest = max((m.in_features or 0 for m in facts.modules if m.kind == "embedding"), default=0)
    if rows != largest or rows is None:
        return None  # positions, token types: small, and not split by vocabulary
    return Style("vocab", {"pad": 128} if rows % tp else {})


def _is_head(facts: ModelFacts, module: ModuleFacts) -> bool:
    """Return whether a layer maps to the vocabulary: it is as wide as the largest embedding."""
    rows = max((m.in_features or 0 for m in facts.modules if m.kind == "embedding"), default=0)
    return module.kind in LAYERS and module.out_features == rows and rows > 0


def _by_siblings(facts: ModelFacts, module: ModuleFacts) -> Style | None:
    """Return colwise for what widens and rowwise for what narrows, where both stand together."""
    parent = module.path.rpartition(".")[0]
    siblings = [facts.by_path[path] for path in _children(facts, parent)]
    layers = [m for m in siblings if m.kind in LAYERS]
    heads = [m for m in layers if m.path in facts.packed or m.path in facts.projections]
    if heads:  # the output layer of an attention
        return Style("rowwise")
    wide = max(((m.out_features or 0) for m in layers), default=0)
    if not any(m.in_features == wide for m in layers) or len(layers) < 2:
        return None
    if module.out_features == wide and module.in_features != wide:
        return Style("colwise")
    return Style("rowwise") if module.in_features == wide else None


def _children(facts: ModelFacts, parent: str) -> list[str]:
    names = facts.by_path[parent].children if parent in facts.by_path else ()
    return [f"{parent}.{name}" if parent else name for name in names]
