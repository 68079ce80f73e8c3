"""The plan as data: one frozen dataclass per block of the language, with its names and defaults.

Nothing here reads text or checks words: `dsl` does. A plan says where and when a model is
computed, never what. Spans say which line of the file each setting came from; they take no part
in comparison, so a plan equals its reprint.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autoshard.source import Span
from autoshard.units import Size

MIB = Size(2**20)
BUCKET = Size(64 * 2**20)


@dataclass(frozen=True)
class Call:
    """Hold a value written as a call: `even(transformer.h.*)`, `auto(by=flops)`."""

    name: str
    args: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Style:
    """Name what a rule does with a module: `colwise(parts=3)`."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Rule:
    """Give every module or parameter that `glob` matches a style."""

    glob: str
    style: Style
    mark: Literal["", "override", "optional"] = ""
    span: Span | None = field(default=None, compare=False)  # of the path, not of the style


@dataclass(frozen=True)
class Use:
    """Take over the rules the model itself brings; they stand before own rule number `at`."""

    name: str
    at: int = 0
    span: Span | None = field(default=None, compare=False)


@dataclass(frozen=True)
class MeshBlock(Mapping[str, "int | str"]):
    """Map axis names to sizes, outermost first; one size may be `auto`."""

    axes: tuple[tuple[str, int | str], ...] = ()

    def __getitem__(self, name: str) -> int | str:
        """Return the size of an axis, or `auto`."""
        return dict(self.axes)[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the axis names, outermost first."""
        return (name for name, _ in self.axes)

    def __len__(self) -> int:
        """Return the number of axes."""
        return len(self.axes)


@dataclass(frozen=True)
class BatchBlock:
    """Hold the batch arithmetic as written: what isn't given is derived by `dsl.resolve`."""

    micro_batch_size: int | None = None
    num_microbatches: int | None = None
    global_batch_size: int | None = None


@dataclass(frozen=True)
class TensorBlock:
    """Hold the rules that split weights over `tp`."""

    sequence_parallel: bool = False
    rules: tuple[Rule, ...] = ()
    uses: tuple[Use, ...] = ()


@dataclass(frozen=True)
class PipelineBlock:
    """Say how the model is cut over `pp` and in which order micro-batches run."""

    split: Call = Call("auto", (), {"by": "flops"})
    schedule: str | Call = "1f1b"
    virtual_stages: int = 1
    max_in_flight: int | None = None  # micro-batches
    accumulation_order: str = "microbatch"
    scatter_boundary: str = "auto"


@dataclass(frozen=True)
class ZeroBlock:
    """Say what data parallel ranks store only a part of, and when they gather it."""

    stage: int = 0
    group: str = "dp"
    units: str | tuple[str, ...] = "auto"
    prefetch: int = 1  # units ahead
    reshard_after_forward: Literal["on", "off", "step"] = "on"
    max_gathered: Size | None = None  # alive at once on a rank
    keep_gathered: Size | None = None  # for backward, although the rest is released
    gather_bucket: Size = BUCKET
    reduce_bucket: Size = BUCKET
    param_persistence_threshold: Size = MIB
    offload_optimizer: str = "off"
    offload_params: str = "off"


@dataclass(frozen=True)
class PrecisionBlock:
    """Name the number types; `compute` follows `params` when it isn't given."""

    params: str = "fp32"
    compute: str | None = None
    grads: str = "fp32"
    reduce: str = "fp32"
    master: str = "fp32"
    loss_scale: float | str | None = None  # a number, or `dynamic`

    def __post_init__(self) -> None:
        """Let `compute` follow `params`."""
        if self.compute is None:
            object.__setattr__(self, "compute", self.params)


@dataclass(frozen=True)
class RecomputeBlock:
    """Hold the rules that drop activations and compute them again."""

    rules: tuple[Rule, ...] = ()
    budget: Size | float | None = None  # bytes, or a part of what nothing recomputed would take


@dataclass(frozen=True)
class FuseBlock:
    """Say which patterns are replaced by one fused operation."""

    add_layer_norm: Literal["auto", "reference", "cuda", "off"] = "auto"
    only: tuple[str, ...] = ()  # globs; empty is everywhere
    compile: Literal["off", "inductor"] = "off"


@dataclass(frozen=True)
class AssumeBlock:
    """Describe the machine and the job for reports; never changes what runs."""

    device: str | None = None
    hbm: Size | None = None
    gpus_per_node: int | None = None
    intra_node: float | None = None  # bytes per second
    inter_node: float | None = None  # bytes per second
    optimizer: str | None = None
    sequence_length: int | None = None


@dataclass(frozen=True)
class Plan:
    """Hold a whole plan; `autoshard.Plan` adds reading, writing and building from Python values."""

    mesh: MeshBlock = MeshBlock()
    batch: BatchBlock = BatchBlock()
    tensor: TensorBlock = TensorBlock()
    pipeline: PipelineBlock = PipelineBlock()
    zero: ZeroBlock = ZeroBlock()
    precision: PrecisionBlock = PrecisionBlock()
    recompute: RecomputeBlock = RecomputeBlock()
    fuse: FuseBlock = FuseBlock()
    assume: AssumeBlock = AssumeBlock()
    spans: Mapping[str, Span] = field(default_factory=dict, compare=False, repr=False)

    def span(self, setting: str) -> Span | None:
        """Return where the value of `block.setting`, or the name of a block, was written."""
        return self.spans.get(setting)

    def key_span(self, setting: str) -> Span | None:
        """Return where the name of `block.setting` was written, None when it is a default."""
        return self.spans.get(f"{setting}:key")

    def is_faulty(self, setting: str) -> bool:
        """Return whether `block.setting` was written but refused, so that it has its default."""
        return self.key_span(setting) is not None and self.span(setting) is None

    def __eq__(self, other: object) -> bool:
        """Compare what the plans say, whichever subclass holds it and wherever it was written."""
        if not isinstance(other, Plan):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in BLOCKS)

    def __hash__(self) -> int:
        """Hash what the plan says."""
        return hash(tuple(getattr(self, name) for name in BLOCKS))


BLOCKS = (
    "mesh",
    "batch",
    "tensor",
    "pipeline",
    "zero",
    "precision",
    "recompute",
    "fuse",
    "assume",
)
