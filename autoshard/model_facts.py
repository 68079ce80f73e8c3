"""What a plan needs to know about a model, as plain data: paths, shapes, heads, ties.

`autoshard.ir.facts.describe` fills it in from a module (on the meta device too). Free of torch, so
that rules are resolved and tested without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal

Kind = Literal["linear", "conv1d", "embedding", "norm", "other"]


@dataclass(frozen=True)
class ParamFacts:
    """Describe one parameter under one of its names.

    `fqn` is the fully qualified name by which this module holds it; `home` is the first name it
    has in the model: they differ for the later names of a tied weight.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = True
    home: str = ""

    def __post_init__(self) -> None:
        """Let a parameter that isn't tied be at home under its own name."""
        if not self.home:
            object.__setattr__(self, "home", self.fqn)


@dataclass(frozen=True)
class ModuleFacts:
    """Describe one module; `params` are its own, not those of its children."""

    path: str
    type_name: str
    kind: Kind = "other"
    weight_shape: tuple[int, ...] | None = None  # as stored: conv1d is (in, out), linear (out, in)
    params: tuple[ParamFacts, ...] = ()
    children: tuple[str, ...] = ()  # names, not paths

    @property
    def out_features(self) -> int | None:
        """Return the output width of a linear or conv1d layer, the row width of an embedding."""
        if self.weight_shape is None or len(self.weight_shape) != 2:
            return None
        return self.weight_shape[0 if self.kind == "linear" else 1]

    @property
    def in_features(self) -> int | None:
        """Return the input width of a linear or conv1d layer, the row count of an embedding."""
        if self.weight_shape is None or len(self.weight_shape) != 2:
            return None
        return self.weight_shape[1 if self.kind == "linear" else 0]


@dataclass(frozen=True)
class Packing:
    """Say that one layer computes query, key and value at once, and how its outputs lie.

    `concatenated`: all of q, then all of k, then all of v, of `parts` outputs each.
    `interleaved`: q, k, v of one head (or head group) beside each other; an even split is right.
    """

    layout: Literal["concatenated", "interleaved"]
    parts: tuple[int, ...]


Role = Literal["query", "key", "value"]


@dataclass(frozen=True)
class Projection:
    """Say that a layer's outputs are attention heads."""

    role: Role
    heads: int
    head_dim: int


@dataclass(frozen=True)
class Split:
    """Propose how to split one parameter over tp; found by following the graph, not names."""

    param: str  # its canonical fully qualified name
    style: Literal["colwise", "rowwise", "vocab"]
    parts: tuple[int, ...] = ()  # of the outputs of a packed weight
    pad: int = 0  # rows: the multiple per rank that a vocabulary is padded to
    why: str = ""  # "attention", "elementwise", "vocabulary": what lies between the pair


@dataclass(frozen=True)
class Whole:
    """Name a matrix that stays whole, and why."""

    param: str
    why: str


@dataclass(frozen=True)
class Proposal:
    """Hold what a captured graph says of tensor parallelism."""

    splits: tuple[Split, ...] = ()
    whole: tuple[Whole, ...] = ()


@dataclass(frozen=True)
class ModelFacts:
    """Describe a model: every module in order (the root has the path ``""``), ties and heads."""

    class_name: str
    modules: tuple[ModuleFacts, ...]
    ties: tuple[tuple[str, ...], ...] = ()  # each: the names of one parameter, first is the home
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    packed: Mapping[str, Packing] = field(default_factory=dict)  # by module path
    projections: Mapping[str, Projection] = field(default_factory=dict)  # by module path
    hf_tp_plan: Mapping[str, str] = field(default_factory=dict)  # glob -> Hugging Face style

    @cached_property
    def by_path(self) -> Mapping[str, ModuleFacts]:
        """Return the modules by path."""
        return {module.path: module for module in self.modules}

    @cached_property
    def params(self) -> Mapping[str, ParamFacts]:
        """Return every parameter by every name it has (tied ones under each)."""
        return {param.fqn: param for module in self.modules for param in module.params}

    @property
    def num_params(self) -> int:
        """Return the number of parameter elements, tied ones once."""
        return sum(prod(p.shape) for p in self.params.values() if p.fqn == p.home)

    def tied_to(self, fqn: str) -> tuple[str, ...]:
        """Return all names of the parameter `fqn`, itself included."""
        return next((names for names in self.ties if fqn in names), (fqn,))
