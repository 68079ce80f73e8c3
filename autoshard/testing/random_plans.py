"""Random plans for small models, and random damage to the text of a plan.

Everything is drawn from one ``random.Random``, so that a seed repeats a run and Hypothesis can
shrink what it finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from autoshard.schedule.make import SCHEDULES
from autoshard.testing.models import Built, tiny_gpt, tiny_hf
from autoshard.testing.plans import PIPELINE_UNITS, TENSOR_RULES

LENGTH = 8
FAMILIES = ("tiny_gpt", "tiny_gpt", "tiny_gpt", "gpt2", "llama", "bloom")
EMBEDDINGS = {
    "tiny_gpt": ("wte", "head"),
    "gpt2": ("transformer.wte", "lm_head"),
    "bloom": ("transformer.word_embeddings", "lm_head"),
    "llama": ("model.embed_tokens", "lm_head"),
}
KINDS = ("vocab", "vocab(pad=8)", "vocab(pad=8)", "replicate", "colwise(gather)")
TWO_STAGES = ("interleaved_1f1b", "zbv", "dualpipev")  # schedules of several stages a rank
PIECES = (
    *'{}()[]=:,;#$"*\\.-\n\t ',
    *("autoshard 1", "override ", "use ", "drop x", "let a = $a\n", "[0..", "{a,", "**"),
    *("1e999999GB", "9" * 400, "\x00", "é", "\u2028", "mesh { dp = auto }", "-1", "stage = 7"),
    *("schedule = zbv", "split = before(", "colwise", "rowwise(gather)", "vocab(pad=0)", "tp = 3"),
)


@dataclass(frozen=True)
class Drawn:
    """A model to build and the plan for it."""

    family: str
    layers: int
    heads: int
    vocab: int
    dropout: float
    samples: int  # of the global batch
    micro_batch_size: int
    plan: str

    def built(self, samples: int) -> Built:
        """Return the model, a batch of so many samples and the loss."""
        sizes = {"layers": self.layers, "heads": self.heads, "vocab": self.vocab}
        if self.family == "tiny_gpt":
            return tiny_gpt(**sizes, batch=samples, length=LENGTH, dropout=self.dropout)
        return tiny_hf(self.family, **sizes, batch=samples, length=LENGTH)


def draw(rng: Random, most_ranks: int = 8) -> Drawn:
    """Return a random model with a random plan; most of them fit, some do not."""
    family = rng.choice(FAMILIES)
    layers, heads = rng.randint(1, 4), rng.choice((4, 8))
    vocab = rng.choice((96, 96, 90, 61))
    while True:
        pp, dp, tp = rng.choice((1, 1, 2, 3)), rng.choice((1, 2)), rng.choice((1, 2, 4))
        if pp * dp * tp <= most_ranks:
            break
    microbatches, size = rng.choice((1, 2, 4)), rng.choice((1, 2))
    lines = [
        "autoshard 1",
        f"mesh {{ {_mesh(rng, pp, dp, tp)} }}",
        f"batch {{ micro_batch_size = {size}, num_microbatches = {microbatches} }}",
    ]
    if tp > 1:
        lines.append(f"tensor {{ {_tensor(rng, family)} }}")
    if pp > 1:
        schedule = rng.choice(tuple(SCHEDULES))
        virtual = 2 if schedule in TWO_STAGES else 1
        layers = max(layers, pp * virtual) if rng.random() < 0.9 else layers
        lines.append(f"pipeline {{ {_pipeline(rng, family, schedule, virtual)} }}")
    if dp > 1 or rng.random() < 0.2:
        lines.append(f"zero {{ {_zero(rng, family)} }}")
    if rng.random() < 0.3:
        lines.append(f"fuse {{ add_layer_norm = {rng.choice(('auto', 'reference', 'off'))} }}")
    dropout = rng.choice((0.0, 0.0, 0.1))
    total = dp * microbatches * size
    return Drawn(family, layers, heads, vocab, dropout, total, size, "\n".join(lines) + "\n")


def damaged(rng: Random, text: str) -> str:
    """Return a plan's text with some pieces cut out, put in, doubled or swapped."""
    for _ in range(rng.randint(1, 5)):
        at = rng.randint(0, len(text))
        end = rng.randint(at, min(len(text), at + 30))
        piece = rng.choice((*PIECES, "", text[at:end] * 2, text[end : end + 20]))
        text = text[:at] + piece + text[end:]
    return text


def _mesh(rng: Random, pp: int, dp: int, tp: int) -> str:
    axes = [("pp", pp), ("dp", dp), ("tp", tp)]
    shown = [f"{name} = {size}" for name, size in axes if size > 1 or rng.random() < 0.5]
    return ", ".join(shown) or "dp = 1"


def _tensor(rng: Random, family: str) -> str:
    rules = TENSOR_RULES[family]
    kinds = [rng.choice(KINDS) for _ in EMBEDDINGS[family]]
    kinds = kinds if rng.random() < 0.1 else kinds[:1] * len(kinds)  # tied weights lie alike
    for name, kind in zip(EMBEDDINGS[family], kinds, strict=True):
        rules = rules.replace(f"{name}: vocab", f"{name}: {kind}")
    if rng.random() < 0.2:
        rules = rules.replace("rowwise", "replicate", 1)
    return rules


def _pipeline(rng: Random, family: str, schedule: str, virtual: int) -> str:
    units = PIPELINE_UNITS[family]
    first, last = EMBEDDINGS[family]
    split = rng.choice((f"even({units})", f"even({units})", f"even({first}, {units}, {last})"))
    more = f", virtual_stages = {virtual}" if virtual > 1 and rng.random() < 0.9 else ""
    return f"split = {split}, schedule = {schedule}{more}"


def _zero(rng: Random, family: str) -> str:
    stage = rng.randint(0, 3)
    settings = [f"stage = {stage}"]
    if stage == 3:
        settings.append(f"param_persistence_threshold = {rng.choice(('0KiB', '1KiB'))}")
        if rng.random() < 0.5:
            settings.append(f"reshard_after_forward = {rng.choice(('on', 'off', 'step'))}")
        if rng.random() < 0.5:
            settings.append(f"prefetch = {rng.randint(0, 2)}")
    if stage and rng.random() < 0.5:
        settings.append(f"reduce_bucket = {rng.choice(('4KiB', '64KiB', '500MB'))}")
    if rng.random() < 0.2:
        settings.append(f"units = {PIPELINE_UNITS[family]}")
    return ", ".join(settings)
