"""What a tensor rule splits: the weight of a layer, its dimension, and the blocks along it."""

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.model_facts import ModelFacts, ModuleFacts
from autoshard.plan import Style

SPLITS = ("colwise", "rowwise", "vocab", "heads")
# Styles that need a weight, and the kinds of layers that they can split.
KINDS: Mapping[str, tuple[str, ...]] = {
    "colwise": ("linear", "conv1d", "embedding"),
    "rowwise": ("linear", "conv1d"),
    "vocab": ("linear", "conv1d", "embedding"),
    "heads": ("linear", "conv1d", "embedding"),
}


@dataclass(frozen=True)
class Target:
    """Hold the layer or parameter at one path; a parameter counts as a linear layer's weight."""

    path: str
    kind: str
    shape: tuple[int, ...] | None
    type_name: str
    module: ModuleFacts | None  # None for a parameter named by itself

    @property
    def weight(self) -> str:
        """Return the name of the weight."""
        return self.path if self.module is None else f"{self.path}.weight"

    def split_dim(self, style: str) -> int | None:
        """Return the dimension of the stored weight that a style splits; None for none."""
        if self.shape is None or style not in SPLITS:
            return None
        if self.kind == "embedding":
            return 0 if style == "vocab" else 1
        is_output = style != "rowwise"
        if len(self.shape) == 1:
            return 0 if is_output else None
        return (1 if is_output else 0) if self.kind == "conv1d" else (0 if is_output else 1)


def target_at(facts: ModelFacts, path: str) -> Target:
    """Return what stands at a path that a rule matched."""
    module = facts.by_path.get(path)
    if module is not None:
        return Target(path, module.kind, module.weight_shape, module.type_name, module)
    return Target(path, "linear", facts.params[path].shape, "parameter", None)


def part_sizes(style: Style, width: int, facts: ModelFacts) -> tuple[int, ...] | None:
    """Return the sizes of the parts that are each split by themselves; None when `q` is unknown."""
    parts = style.options.get("parts", 1)
    if isinstance(parts, int):
        return (width // parts,) * parts if width % parts == 0 else (width,)
    if all(isinstance(part, int) for part in parts):
        return parts
    heads = {"q": facts.num_heads, "kv": facts.num_kv_heads}
    if facts.head_dim is None or any(heads.get(p, 1) is None for p in parts if isinstance(p, str)):
        return None
    return tuple(p if isinstance(p, int) else (heads[p] or 0) * facts.head_dim for p in parts)
