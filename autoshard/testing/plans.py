"""Plan texts for the tiny models, and the cells of the equivalence matrix."""

from __future__ import annotations

from dataclasses import dataclass

TENSOR_RULES = {
    "tiny_gpt": """
      wte: vocab
      h.* { attn.qkv: colwise(parts=3), attn.proj: rowwise, mlp.up: colwise, mlp.down: rowwise }
      head: vocab
    """,
    "gpt2": """
      transformer.wte: vocab
      transformer.h.* {
        attn.c_attn: colwise(parts=3), attn.c_proj: rowwise
        mlp.c_fc: colwise, mlp.c_proj: rowwise
      }
      lm_head: vocab
    """,
    "bloom": """
      transformer.word_embeddings: vocab
      transformer.h.* {
        self_attention.query_key_value: colwise, self_attention.dense: rowwise
        mlp.dense_h_to_4h: colwise, mlp.dense_4h_to_h: rowwise
      }
      lm_head: vocab
    """,
    "llama": """
      model.embed_tokens: vocab
      model.layers.* {
        self_attn.{q,k,v}_proj: colwise, self_attn.o_proj: rowwise
        mlp.{gate,up}_proj: colwise, mlp.down_proj: rowwise
      }
      lm_head: vocab
    """,
}

PIPELINE_UNITS = {
    "tiny_gpt": "h.*",
    "gpt2": "transformer.h.*",
    "bloom": "transformer.h.*",
    "llama": "model.layers.*",
}


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism and what goes with them."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    zero: int = 0
    shard: int = 0  # ranks of dp that share one copy (hybrid sharding); 0: all of them
    schedule: str = "1f1b"
    microbatches: int = 1
    micro_batch_size: int = 2
    sequence: bool = False  # sequence parallelism

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.dp * self.pp * self.tp

    @property
    def samples(self) -> int:
        """Return the number of samples of the global batch."""
        return self.dp * self.microbatches * self.micro_batch_size

    def __str__(self) -> str:
        parts = [f"{axis}{n}" for axis in ("dp", "pp", "tp") if (n := getattr(self, axis)) > 1]
        if self.sequence:
            parts.append("sequence")
        if self.dp > 1:
            parts.append(f"zero{self.zero}" + (f"-shard{self.shard}" if self.shard else ""))
        if self.pp > 1:
            parts.append(f"{self.schedule}-m{self.microbatches}")
        return "-".join(parts) or "one"


MATRIX = (
    Layout(tp=2),
    Layout(tp=4, sequence=True),
    Layout(pp=2, schedule="gpipe", microbatches=4),
    Layout(pp=2, microbatches=4),
    Layout(pp=4, microbatches=2),
    *(Layout(dp=2, zero=stage, microbatches=2) for stage in range(4)),
    Layout(pp=2, tp=2, microbatches=2),
    Layout(dp=2, tp=2, zero=3, sequence=True),
    Layout(dp=2, pp=2, zero=1, microbatches=4),
    Layout(dp=2, pp=2, tp=2, zero=3, microbatches=2, sequence=True),
)


def plan_text(family: str, layout: Layout, extra: str = "") -> str:
    """Return the plan of a tiny model of ``family`` for a layout; ``extra`` blocks are appended."""
    data = f"dp = {layout.dp}"
    if layout.shard:
        data = f"dp_replicate = {layout.dp // layout.shard}, dp_shard = {layout.shard}"
    lines = [
        "autoshard 1",
        f"mesh {{ pp = {layout.pp}, {data}, tp = {layout.tp} }}",
        f"batch {{ micro_batch_size = {layout.micro_batch_size}, "
        f"num_microbatches = {layout.microbatches} }}",
    ]
    if layout.tp > 1:
        sequence = "sequence_parallel = on\n" if layout.sequence else ""
        lines.append(f"tensor {{ {sequence}{TENSOR_RULES[family]} }}")
    if layout.pp > 1:
        split = f"even({PIPELINE_UNITS[family]})"
        lines.append(f"pipeline {{ split = {split}, schedule = {layout.schedule} }}")
    if layout.dp > 1:
        # a threshold of 0 shards every parameter, however small the model
        threshold = ", param_persistence_threshold = 0KiB" if layout.zero == 3 else ""
        group = ", group = dp_shard" if layout.shard else ""
        lines.append(f"zero {{ stage = {layout.zero}{group}{threshold} }}")
    return "\n".join([*lines, extra])
