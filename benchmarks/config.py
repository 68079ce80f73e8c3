"""What the benchmarks measure: sizes, our plans, and the rows of the table. No code of a peer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """A GPT, its global batch, and how often it is measured."""

    layers: int
    width: int
    heads: int
    vocab: int
    length: int
    batch: int  # sequences of all ranks together in one step
    microbatches: int  # of a pipeline
    rounds: int
    inner: int  # steps in one timed block, which should last a second


FULL = Size(8, 512, 8, 4096, 128, 8, 4, 7, 1)  # 29.5 million parameters
SHORT = Size(8, 256, 8, 2048, 128, 8, 4, 5, 2)  # 7.4 million: the whole table in ten minutes
QUICK = Size(4, 64, 4, 256, 32, 8, 4, 3, 2)  # proves that all of it runs; times say little
SIZES = {"full": FULL, "short": SHORT, "quick": QUICK}

GATED_STEPS = 4  # whose losses must be those of a single process
LOSS_TOLERANCE = 1e-4  # relative
LEARNING_RATE = 1e-3

RULES = """tensor {{
  sequence_parallel = {sequence}
  embed.wte: vocab
  h.* {{ attn.{{q,k,v}}: colwise, attn.out: rowwise, mlp.up: colwise, mlp.down: rowwise }}
  head: vocab
}}
"""
# Small parameters are cut too, as FSDP2 cuts them.
ZERO = "zero {{ stage = {stage}, units = h.*, param_persistence_threshold = 0B{more} }}\n"
SPLIT = "pipeline {{ split = even(h.*), schedule = {schedule}, virtual_stages = {virtual} }}\n"


@dataclass(frozen=True)
class Ours:
    """A plan of ours: its mesh and its blocks; the batch block follows from the size."""

    mesh: dict[str, int]
    blocks: str = ""

    def text(self, size: Size) -> str:
        """Return the whole plan."""
        mesh = ", ".join(f"{axis} = {n}" for axis, n in self.mesh.items())
        count = size.microbatches if "pp" in self.mesh else 1
        rows = size.batch // (count * self.mesh.get("dp", 1))
        batch = f"batch {{ micro_batch_size = {rows}, num_microbatches = {count} }}\n"
        return f"autoshard 1\nmesh {{ {mesh} }}\n{batch}{self.blocks}"


def _pipeline(schedule: str, virtual: int = 1) -> Ours:
    return Ours({"pp": 2}, SPLIT.format(schedule=schedule, virtual=virtual))


def zero(stage: int, ranks: int = 2, more: str = "") -> Ours:
    """Return a plan of ZeRO; ``more`` settings begin with a comma."""
    return Ours({"dp": ranks}, ZERO.format(stage=stage, more=more))


TP, SP = RULES.format(sequence="off"), RULES.format(sequence="on")
PLANS = {
    "one rank": Ours({"dp": 1}),
    "dp": Ours({"dp": 2}),
    "dp 4": Ours({"dp": 4}),
    "zero 2": zero(2),
    "zero 3": zero(3),
    "zero 3, no prefetch": zero(3, more=", prefetch = 0"),
    "zero 3 kept": zero(3, more=", reshard_after_forward = off"),
    "tp": Ours({"tp": 2}, TP),
    "tp sp": Ours({"tp": 2}, SP),
    "gpipe": _pipeline("gpipe"),
    "1f1b": _pipeline("1f1b"),
    "interleaved": _pipeline("interleaved_1f1b", 2),
    "zb": _pipeline("zb_h1"),
    "zbv": _pipeline("zbv", 2),
    "pp tp": Ours({"pp": 2, "tp": 2}, TP + SPLIT.format(schedule="1f1b", virtual=1)),
    "zero 3 tp": Ours({"dp": 2, "tp": 2}, SP + ZERO.format(stage=3, more="")),
}


@dataclass(frozen=True)
class Row:
    """A plan of ours beside a peer of the same kind."""

    ours: str  # of PLANS
    peer: str  # of benchmarks.peers.PEERS


@dataclass(frozen=True)
class Launch:
    """Rows that run in the same processes, with the anchors among them."""

    name: str
    world: int
    rows: tuple[Row, ...]

    @property
    def anchors(self) -> tuple[str, ...]:
        """Return what every launch measures besides: the floor, and what everyone trusts."""
        return ("no communication", "ddp") if self.world > 1 else ()

    @property
    def entrants(self) -> tuple[str, ...]:
        """Return all that is built, each once; ours carry the prefix ``ours: ``."""
        pairs = (name for row in self.rows for name in (f"ours: {row.ours}", row.peer))
        return tuple(dict.fromkeys((*self.anchors, *pairs)))


LAUNCHES = (
    Launch("single", 1, (Row("one rank", "eager"),)),
    Launch("data", 2, (Row("dp", "ddp"),)),
    Launch(
        "zero",
        2,
        (
            Row("zero 3", "fsdp2"),
            Row("zero 3", "fsdp2, messages"),
            Row("zero 2", "fsdp2 kept"),
            Row("zero 2", "fsdp2 kept, messages"),
        ),
    ),
    Launch("tensor", 2, (Row("tp", "dtensor"), Row("tp sp", "dtensor sp"))),
    Launch(
        "pipeline",
        2,
        (
            Row("gpipe", "torch GPipe"),
            Row("1f1b", "torch 1F1B"),
            Row("interleaved", "torch Interleaved1F1B"),
            Row("zb", "torch InterleavedZeroBubble"),
            Row("zbv", "torch ZBVZeroBubble"),
        ),
    ),
    Launch(
        "combined",
        4,
        (
            Row("pp tp", "torch 1F1B, dtensor"),
            Row("zero 3 tp", "fsdp2, dtensor sp"),
            Row("zero 3 tp", "fsdp2, dtensor sp, messages"),
        ),
    ),
)
