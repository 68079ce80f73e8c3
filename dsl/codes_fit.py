"""The pages of plans that don't fit: AS3xx mesh to zero, AS4xx shapes, AS5xx precision, AS601."""

from collections.abc import Mapping

from autoshard.dsl.specs import Page

FIT_PAGES: Mapping[str, Page] = {
    "AS301": Page(
        "two axes are `auto`",
        "One axis can be derived from the number of processes; the others need numbers.",
    ),
    "AS302": Page(
        "the mesh doesn't fit the number of processes",
        "The sizes of all axes multiply to the number of processes (torchrun's WORLD_SIZE, or "
        "`--world`). `dp = auto` fills in what is left.",
        "mesh { pp = 2, tp = 2 }  # with 8 processes",
        "mesh { pp = 2, dp = auto, tp = 2 }",
    ),
    "AS303": Page(
        "`dp` beside `dp_replicate` or `dp_shard`",
        "Plain data parallel is `dp`. Hybrid sharding divides it into `dp_replicate` groups of "
        "`dp_shard` ranks, and `dp` then means both.",
    ),
    "AS304": Page(
        "the batch doesn't add up",
        "micro_batch_size x num_microbatches x dp = global_batch_size. Give any two of the three "
        "and the third is derived; give all three and they are checked.",
        "batch { micro_batch_size = 4, num_microbatches = 8, global_batch_size = 100 }",
        "batch { micro_batch_size = 4, global_batch_size = 128 }",
    ),
    "AS305": Page(
        "the processes can't be divided over the other axes",
        "`auto` is the number of processes divided by the sizes of the other axes.",
    ),
    "AS306": Page(
        "context parallelism is reserved",
        "The axis `cp` has its name for a later version.",
    ),
    "AS307": Page(
        "the cuts don't make as many stages as there are places",
        "`before(A, B, ...)` makes one stage more than it names modules; a pipeline needs "
        "pp x virtual_stages stages.",
        "pipeline { split = before(h.6) }  # pp = 4",
        "pipeline { split = before(h.3, h.6, h.9) }",
    ),
    "AS308": Page(
        "the named modules can't be cut into these stages",
        "`even` needs at least one module a stage; each path of `before` names one module.",
    ),
    "AS309": Page(
        "the schedule can't do with so many stages per rank",
        "gpipe, 1f1b and the zb schedules have one stage per rank, interleaved_1f1b several, zbv "
        "and dualpipev two.",
        "schedule = 1f1b, virtual_stages = 2",
        "schedule = interleaved_1f1b, virtual_stages = 2",
    ),
    "AS310": Page(
        "ZeRO-3 with a pipeline is expensive",
        "A warning: a stage works on many micro-batches per step and gathers its parameters for "
        "each. Stage 1 shares the optimizer's state without gathering; "
        "`reshard_after_forward = step` gathers once per step and pays in memory.",
    ),
    "AS311": Page(
        "a setting that has no effect",
        "A warning: another setting makes this one useless, for example `prefetch` below stage 3.",
    ),
    "AS312": Page(
        "tensor parallel leaves the node",
        "A warning: two all-reduces per layer wait on the slow link. Keep `tp` the last axis, at "
        "most as large as a node; `gpus_per_node` in `assume` says how large that is.",
    ),
    "AS313": Page(
        "`zero` shares over an axis that the mesh lacks",
        "`group = dp_shard` needs the axis `dp_shard` in `mesh`.",
    ),
    "AS314": Page(
        "a named module computes nothing",
        "The path names a module, but none that could begin a stage or hold a unit: it computes "
        "nothing in this model, or has no parameters.",
    ),
    "AS315": Page(
        "`max_gathered` is too small",
        "Even when each unit is gathered where it is needed and released right after, more bytes "
        "than that are whole at once: a unit (or a part of one, where `gather_bucket` cuts it) and "
        "what is read before and after it, such as a tied embedding. The message names the largest "
        "and the least size that works.",
        "zero { stage = 3, max_gathered = 1KiB }",
        "zero { stage = 3, max_gathered = 256MiB }",
    ),
    "AS401": Page(
        "the vocabulary doesn't divide",
        "`pad=n` rounds the rows up to a multiple of n x tp. Checkpoints keep the model's own "
        "size, and the padded logits take no part in the loss.",
        "wte: vocab",
        "wte: vocab(pad=128)",
    ),
    "AS402": Page(
        "attention heads don't divide",
        "Each rank computes whole heads, so `tp` divides the number of query heads and of "
        "key/value heads. `replicate=n` keeps each key/value head on n ranks, with "
        "`parts=[q, kv, kv]` those of a packed weight. Or `pad=n` adds heads of zeros, in the "
        "layers that make heads and in the one that reads them: n is the outputs of one head (for "
        "queries: of all heads that share a key head), and with `parts` it counts for the "
        "smallest part. Checkpoints keep the model's own size; zeros stay zero.",
        "{q,k,v}_proj: colwise  # 8 key/value heads, tp = 16",
        "{q,k,v}_proj: colwise(replicate=2)",
    ),
    "AS403": Page(
        "one weight packs query, key and value",
        "Split evenly, the first rank would hold queries only. `parts=3` splits each third; "
        "`parts=[q, kv, kv]` is for fewer key/value heads. A weight whose outputs alternate head "
        "by head (as BLOOM's) is split rightly by plain `colwise`; `parts=1` says so.",
        "attn.c_attn: colwise",
        "attn.c_attn: colwise(parts=3)",
    ),
    "AS404": Page(
        "tied weights are split differently",
        "An embedding and an output layer that share one weight need the same split.",
        "wte: vocab",
        "wte: vocab;  lm_head: vocab",
    ),
    "AS405": Page(
        "a layer's width doesn't divide",
        "`tp` must divide the outputs (colwise) or the inputs (rowwise) of a layer, or `pad=n` "
        "rounds them up to a multiple of n x tp.",
    ),
    "AS406": Page(
        "the parts don't make the whole",
        "`parts=n` needs a width that n divides; the sizes in `parts=[...]` add up to the width. "
        "`q` and `kv` stand for all query heads and all key or value heads.",
    ),
    "AS407": Page(
        "the tokens don't divide",
        "With `sequence_parallel = on` each rank holds 1/tp of the tokens between layers, so `tp` "
        "must divide the tokens of a sample. A class token counts: 16 patches and one token are "
        "17. Nothing is padded, since a padded token would have to be masked in every attention: "
        "pad the batch, or leave the setting off.",
    ),
    "AS408": Page(
        "an operator has no placement rule",
        "How such an operator acts on parts isn't known, so each rank runs it on whole values, "
        "which is right but neither fast nor proved. It is an error only with `--strict`; else "
        "`inspect --remarks` lists it and `verify` calls it unproven.",
    ),
    "AS501": Page(
        "fp16 without a loss scale",
        "Small gradients vanish in fp16. `loss_scale = dynamic` adapts the scale and skips steps "
        "that overflow; bf16 needs no scale.",
        "precision { params = fp16 }",
        "precision { params = fp16, loss_scale = dynamic }",
    ),
    "AS502": Page(
        "a loss scale without fp16",
        "A warning: bf16 and fp32 have the range that makes a scale needless.",
    ),
    "AS503": Page(
        "the master copy is narrower than the parameters",
        "`master` is what the optimizer updates and what is saved: it must hold at least what "
        "layers compute with.",
        "precision { params = fp32, master = bf16 }",
        "precision { params = bf16, master = fp32 }",
    ),
    "AS601": Page(
        "planned, not executable yet",
        "The language is ahead of this version: `plan check` and `inspect` accept the setting and "
        "say so, `parallelize` and `verify` refuse it. Nothing is ever ignored.",
    ),
}
