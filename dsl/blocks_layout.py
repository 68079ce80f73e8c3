"""The blocks that say where a model is computed: mesh, batch, tensor, pipeline."""

from autoshard.dsl.compound_values import Calls, Parts
from autoshard.dsl.specs import BlockSpec, SettingSpec, StyleSpec
from autoshard.dsl.values import Enum, Flag, Integer, OnOff

MESH = BlockSpec(
    "mesh",
    "How the ranks are arranged: one axis per kind of parallelism, outermost first. The last axis "
    "is neighbouring ranks, so put `tp` there. The sizes multiply to the number of processes.",
    (
        SettingSpec(
            "pp",
            Integer(1, words=("auto",)),
            "pipeline stages",
            synonyms=("pipeline_model_parallel_size", "pipe", "pipeline_parallel_degree"),
        ),
        SettingSpec(
            "dp",
            Integer(1, words=("auto",)),
            "data parallel ranks",
            synonyms=("data", "data_parallel_size", "ddp", "fsdp"),
        ),
        SettingSpec(
            "dp_replicate",
            Integer(1, words=("auto",)),
            "groups that hold copies, with `dp_shard` instead of `dp`",
            synonyms=("data_parallel_replicate_degree",),
        ),
        SettingSpec(
            "dp_shard",
            Integer(1, words=("auto",)),
            "ranks that share one copy, with `dp_replicate` instead of `dp`",
            synonyms=("data_parallel_shard_degree",),
        ),
        SettingSpec(
            "cp",
            Integer(1, words=("auto",)),
            "reserved for context parallelism",
            False,
            ("context_parallel_size", "sp", "context"),
        ),
        SettingSpec(
            "ep",
            Integer(1, words=("auto",)),
            "ranks that share the experts",
            False,
            ("expert_model_parallel_size", "expert"),
        ),
        SettingSpec(
            "tp",
            Integer(1, words=("auto",)),
            "ranks that split each layer",
            synonyms=("tensor_model_parallel_size", "model", "mp", "model_parallel_size", "tensor"),
        ),
    ),
    synonyms=("parallel", "parallelism", "device_mesh", "topology", "grid"),
    notes=("One axis may be `auto`: the number of processes divided by the others.",),
)
BATCH = BlockSpec(
    "batch",
    "How many samples a step takes. Give any two of the three and the third follows; all three are "
    "checked: micro_batch_size x num_microbatches x dp = global_batch_size.",
    (
        SettingSpec(
            "micro_batch_size",
            Integer(1),
            "samples per micro-batch and data parallel rank",
            synonyms=(
                "micro",
                "train_micro_batch_size_per_gpu",
                "per_device_train_batch_size",
                "local_batch_size",
                "batch_size",
                "mbs",
            ),
        ),
        SettingSpec(
            "num_microbatches",
            Integer(1),
            "micro-batches per step; also plain gradient accumulation (1)",
            synonyms=(
                "gradient_accumulation_steps",
                "microbatches",
                "accumulation_steps",
                "chunks",
                "num_micro_batches",
            ),
        ),
        SettingSpec(
            "global_batch_size",
            Integer(1),
            "samples per step over all ranks",
            synonyms=("global", "train_batch_size", "gbs", "total_batch_size"),
        ),
    ),
    synonyms=("train_batch", "data", "batches", "training"),
)
GATHER = SettingSpec("gather", Flag(), "gather the outputs, so that what follows sees them whole")
PAD = SettingSpec(
    "pad",
    Integer(1),
    "pad the split dimension by zeros up to a multiple of this times the number of ranks; "
    "of packed parts the smallest, the others in proportion",
)
PARTS = SettingSpec("parts", Parts(), "how a packed weight is divided, each part split by itself")
TENSOR = BlockSpec(
    "tensor",
    "How weights are split over `tp`. Each rule gives a style to the modules or parameters that "
    "its path matches.",
    (
        SettingSpec(
            "sequence_parallel",
            OnOff(),
            "keep norms, dropout and residuals on 1/tp of the tokens",
            synonyms=("sp", "sequence", "enable_sequence_parallel"),
        ),
    ),
    (
        StyleSpec(
            "colwise",
            "split the outputs of a layer, the columns of an embedding",
            (
                GATHER,
                PARTS,
                SettingSpec(
                    "replicate",
                    Integer(1),
                    "keep each key/value head on so many ranks: tp / number of heads",
                ),
                PAD,
            ),
            synonyms=("column", "col", "ColwiseParallel", "column_parallel"),
        ),
        StyleSpec(
            "rowwise",
            "split the inputs of a layer and sum its outputs",
            (
                SettingSpec(
                    "split_input",
                    Flag(),
                    "split an input that comes in whole; said or not, it is split where it must be",
                ),
                SettingSpec("parts", Parts(), "how a weight with packed inputs is divided"),
                PAD,
            ),
            synonyms=("row", "RowwiseParallel", "row_parallel"),
        ),
        StyleSpec(
            "vocab",
            "split the vocabulary of an embedding or output layer; logits stay split for the loss",
            (GATHER, PAD),
            synonyms=("vocab_parallel", "vocabulary", "VocabParallelEmbedding"),
        ),
        StyleSpec(
            "experts", "spread the experts over `ep`", (), False, ("expert", "ExpertParallel")
        ),
        StyleSpec(
            "replicate",
            "keep whole on every rank",
            (
                SettingSpec(
                    "grad",
                    Enum(("sum",)),
                    "sum the gradient, for a weight in a split region (a norm of each head, say); "
                    "where it is needed it is summed anyway",
                ),
            ),
            synonyms=("replicated", "NoParallel", "none"),
        ),
        StyleSpec(
            "heads",
            "split whatever is per head, such as relative position tables",
            (),
            synonyms=("head",),
        ),
    ),
    synonyms=("tp", "tensor_parallel", "tensor_parallelism", "shard", "sharding", "parallelize"),
    notes=(
        "Attention needs no rule of its own: the split of its query, key and value layers carries "
        "through it.",
        "`use transformers.tp_plan` takes over the rules that a Hugging Face model brings along.",
    ),
)
SPLIT = Calls((("auto", (("by", ("flops", "params")),)), ("even", ()), ("before", ())))
SCHEDULES = Calls(
    (("csv", ()),),
    ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_2p", "zbv", "dualpipev"),
    ("csv",),
)
PIPELINE = BlockSpec(
    "pipeline",
    "How the model is cut into stages over `pp`, and in which order they work.",
    (
        SettingSpec(
            "split",
            SPLIT,
            "where to cut: by cost, into equal numbers of the named modules, or before named ones",
            synonyms=("partition_method", "split_points", "stages", "cut"),
        ),
        SettingSpec(
            "schedule",
            SCHEDULES,
            "the order of forward and backward passes",
            synonyms=("pipeline_parallel_schedule",),
        ),
        SettingSpec(
            "virtual_stages",
            Integer(1),
            "stages per rank",
            synonyms=(
                "num_model_chunks",
                "virtual_pipeline_model_parallel_size",
                "interleave",
                "v",
            ),
        ),
        SettingSpec(
            "max_in_flight",
            Integer(1),
            "memory limit of the zero-bubble schedules, in micro-batches",
            synonyms=("memory_limit",),
        ),
        SettingSpec(
            "accumulation_order",
            Enum(("microbatch", "schedule")),
            "add gradients in the order of micro-batches, or as they come",
        ),
        SettingSpec(
            "scatter_boundary",
            Enum(("auto", "on", "off")),
            "send a boundary value in tp parts and gather it there (auto: from 1 MiB on)",
            synonyms=("scatter_gather_tensors",),
        ),
    ),
    synonyms=("pp", "pipe", "pipeline_parallel", "stages"),
)
