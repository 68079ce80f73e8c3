"""Draft a plan for a model: rules guessed from its layers, or taken from Hugging Face's tp_plan.

A guess to start from, not a search: people review it, `plan check` checks it.
"""

from collections.abc import Iterator

from autoshard.dsl.foreign import HF_REFUSED, HF_STYLES
from autoshard.dsl.nodes import quoted
from autoshard.dsl.printer import show_style
from autoshard.dsl.schema import BLOCK
from autoshard.model_facts import ModelFacts, ModuleFacts
from autoshard.plan import Style
from autoshard.units import show_count

LAYERS = ("linear", "conv1d")
TP_SIZES = (8, 4, 2, 1)  # at most the ranks of one machine, by custom
ZERO = "zero { stage = 1 }  # share the optimizer's state over dp"


def draft(facts: ModelFacts, world_size: int | None, origin: str) -> str:
    """Return plan text; `origin` is `shapes` or `hf`."""
    tp = _tp(facts, world_size)
    dp = world_size // tp if world_size else "auto"
    rules = list(_hf_rules(facts) if origin == "hf" else _guessed(facts, tp))
    return "\n".join(
        [
            "autoshard 1",
            f"# {facts.class_name}, {show_count(facts.num_params)} parameters: a draft to edit.",
            "",
            f"mesh {{ dp = {dp}, tp = {tp} }}",
            "",
            "batch { micro_batch_size = 1, num_microbatches = 1 }",
            "",
            *(["tensor {", *(f"  {rule}" for rule in rules), "}", ""] if rules else []),
            *([ZERO, ""] if dp != 1 else []),
        ]
    )


def _tp(facts: ModelFacts, world_size: int | None) -> int:
    """Return the largest size that divides the heads and, where it is known, the processes."""
    heads = facts.num_kv_heads or facts.num_heads or 1
    fits = (n for n in TP_SIZES if heads % n == 0 and (world_size or n) % n == 0)
    return next(fits)


def _hf_rules(facts: ModelFacts) -> Iterator[str]:
    for glob, name in facts.hf_tp_plan.items():
        if name in HF_STYLES:
            style, options = HF_STYLES[name]
            yield f"{quoted(glob)}: {show_style(BLOCK['tensor'], Style(style, options))}"
        else:
            reason = HF_REFUSED.get(name, "no counterpart here yet")
            yield f"# {glob}: {name} has {reason}"


def _guessed(facts: ModelFacts, tp: int) -> Iterator[str]:
    """Yield one rule for each kind of layer, layers that differ in a number as one."""
    rules: dict[str, str] = {}
    for module in facts.modules:
        style = _style(facts, module, tp)
        if style is not None:
            pattern = ".".join("*" if s.isdecimal() else s for s in module.path.split("."))
            rules.setdefault(pattern, show_style(BLOCK["tensor"], style))
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
