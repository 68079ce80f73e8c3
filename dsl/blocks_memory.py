"""The blocks that say how it is stored and computed: zero, precision, recompute, fuse, assume."""

from autoshard.dsl.compound_values import Globs, WordList
from autoshard.dsl.specs import BlockSpec, SettingSpec, StyleSpec
from autoshard.dsl.values import Bandwidth, Bytes, Enum, Integer, LossScale

DTYPES = Enum(
    ("fp32", "bf16", "fp16"),
    (
        ("float32", "fp32"),
        ("float", "fp32"),
        ("bfloat16", "bf16"),
        ("float16", "fp16"),
        ("half", "fp16"),
    ),
)
OFFLOAD = Enum(("off", "cpu"), (("none", "off"), ("on", "cpu"), ("nvme", "cpu")))
DEVICES = (
    *("cpu", "v100_16g", "v100_32g", "a100_40g", "a100_80g", "h100", "h200", "b200"),
    *("mi250x", "mi300x", "l4", "l40s", "rtx4090"),
)

ZERO = BlockSpec(
    "zero",
    "What data parallel ranks store only their part of: stage 1 the optimizer's state, 2 the "
    "gradients too, 3 the parameters too.",
    (
        SettingSpec("stage", Integer(0, 3), "0 to 3"),
        SettingSpec(
            "group",
            Enum(("dp", "dp_shard")),
            "the axis to share over; `dp_shard` is hybrid sharding",
            synonyms=("zero_hpz_partition_size",),
        ),
        SettingSpec(
            "units",
            Globs(("auto",)),
            "modules that are gathered and released as one (auto: the repeated blocks)",
            synonyms=("auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "wrap"),
        ),
        SettingSpec(
            "prefetch",
            Integer(0),
            "how many units ahead gathers start",
            synonyms=("prefetch_depth", "stage3_prefetch_bucket_size", "forward_prefetch"),
        ),
        SettingSpec(
            "reshard_after_forward",
            Enum(
                ("on", "off", "step"),
                (
                    ("true", "on"),
                    ("false", "off"),
                    ("always", "on"),
                    ("never", "off"),
                    ("default", "on"),
                ),
            ),
            "release parameters after the forward pass; `step` keeps them over the whole step",
            synonyms=("release", "reshard"),
        ),
        SettingSpec(
            "max_gathered",
            Bytes(elements=False),
            "how much may be gathered at once on a rank: gathers start later, and less stays for "
            "backward, where more would be",
            synonyms=("stage3_max_live_parameters", "limit_all_gathers", "gather_limit"),
        ),
        SettingSpec(
            "keep_gathered",
            Bytes(elements=False),
            "how much of it to keep for backward all the same, last units first",
        ),
        SettingSpec(
            "gather_bucket",
            Bytes(like="allgather_bucket_size"),
            "how much one gather collects",
            synonyms=("allgather_bucket_size", "bucket", "bucket_size"),
        ),
        SettingSpec(
            "reduce_bucket",
            Bytes(like="reduce_bucket_size"),
            "how much one gradient reduction collects",
            synonyms=("reduce_bucket_size", "bucket_cap_mb"),
        ),
        SettingSpec(
            "param_persistence_threshold",
            Bytes(like="stage3_param_persistence_threshold"),
            "smaller parameters stay whole on every rank",
            synonyms=("stage3_param_persistence_threshold", "persist_below", "min_num_params"),
        ),
        SettingSpec(
            "offload_optimizer",
            OFFLOAD,
            "keep the optimizer's state, and the parameters it updates, in host memory (on CUDA: "
            "pinned; a machine without has no other memory)",
            synonyms=("cpu_offload", "offload"),
        ),
        SettingSpec(
            "offload_params",
            OFFLOAD,
            "keep what stage 3 cuts in host memory: each gather copies its part from there",
            synonyms=("offload_param",),
        ),
    ),
    synonyms=("zero_optimization", "fsdp", "deepspeed", "fully_shard", "ddp"),
)
PRECISION = BlockSpec(
    "precision",
    "The number types of a step.",
    (
        SettingSpec(
            "params",
            DTYPES,
            "parameters as they are stored for computing",
            synonyms=("param_dtype", "dtype", "bf16", "fp16"),
        ),
        SettingSpec(
            "compute",
            DTYPES,
            "what layers compute in (as `params`)",
            synonyms=("compute_dtype", "autocast"),
        ),
        SettingSpec(
            "grads",
            DTYPES,
            "gradients as they are accumulated",
            synonyms=("grad_dtype", "grad_accum_dtype"),
        ),
        SettingSpec(
            "reduce",
            DTYPES,
            "gradients as they are reduced between ranks",
            synonyms=("reduce_dtype", "communication_data_type"),
        ),
        SettingSpec(
            "master",
            DTYPES,
            "the copy of the parameters that the optimizer updates",
            synonyms=("master_weights", "fp32_master"),
        ),
        SettingSpec(
            "loss_scale",
            LossScale(),
            "scale of the loss against underflow in fp16",
            synonyms=("initial_scale_power", "grad_scaler"),
        ),
    ),
    synonyms=("bf16", "fp16", "amp", "mixed_precision", "dtype", "torch_autocast", "autocast"),
)
RECOMPUTE = BlockSpec(
    "recompute",
    "Which activations are dropped after the forward pass and computed again.",
    (
        SettingSpec(
            "budget",
            Bytes(elements=False, percent=True),
            "choose what to recompute so that the rest fits",
            synonyms=("activation_memory_budget",),
        ),
    ),
    (
        StyleSpec(
            "full",
            "keep only the inputs of the module",
            synonyms=("all", "uniform", "block", "checkpoint"),
        ),
        StyleSpec(
            "selective",
            "keep some intermediate results",
            (SettingSpec("save", WordList(("attention", "matmul")), "what to keep"),),
            synonyms=("save", "partial"),
        ),
        StyleSpec("none", "keep everything", synonyms=("off", "no")),
    ),
    synonyms=(
        "activation_checkpoint",
        "activation_checkpointing",
        "checkpoint",
        "checkpointing",
        "gradient_checkpointing",
        "remat",
        "rematerialize",
        "ac",
    ),
)
FUSE = BlockSpec(
    "fuse",
    "Which patterns become one fused operation.",
    (
        SettingSpec(
            "add_layer_norm",
            Enum(
                ("auto", "reference", "cuda", "off"),
                (("on", "auto"), ("true", "auto"), ("false", "off")),
            ),
            "residual add and LayerNorm or RMSNorm, with the bias and dropout before it (auto: "
            "the CUDA kernel where it is built and there is a GPU, else the reference)",
            ("auto", "reference", "off"),
            ("layer_norm", "fused_layer_norm"),
        ),
        SettingSpec("only", Globs(), "fuse only inside these modules"),
        SettingSpec(
            "compile",
            Enum(("off", "inductor"), (("on", "inductor"), ("true", "inductor"))),
            "what stands between collectives and fused operations, compiled when a program is "
            "linked; what the compiler refuses runs as it is",
            synonyms=("torch_compile", "compiler"),
        ),
    ),
    synonyms=("fusion", "kernels", "fused", "kernel"),
)
ASSUME = BlockSpec(
    "assume",
    "What reports should assume of the machine and the job. It never changes what runs.",
    (
        SettingSpec("device", Enum(DEVICES), "the accelerator", synonyms=("gpu", "accelerator")),
        SettingSpec(
            "hbm",
            Bytes(elements=False),
            "memory per device",
            synonyms=("memory", "gpu_memory", "vram"),
        ),
        SettingSpec(
            "gpus_per_node",
            Integer(1),
            "devices per machine",
            synonyms=("nproc_per_node", "gpus", "devices_per_node"),
        ),
        SettingSpec(
            "intra_node", Bandwidth(), "link between devices of one machine", synonyms=("nvlink",)
        ),
        SettingSpec(
            "inter_node",
            Bandwidth(),
            "link between machines, per device",
            synonyms=("infiniband", "network"),
        ),
        SettingSpec(
            "optimizer",
            Enum(("adamw", "adam", "sgd", "sgd_momentum", "lion", "adagrad", "rmsprop")),
            "whose state is counted",
            synonyms=("optim",),
        ),
        SettingSpec(
            "sequence_length",
            Integer(1),
            "tokens per sample",
            synonyms=("seq_len", "seq_length", "max_length", "block_size"),
        ),
    ),
    synonyms=("hardware", "cluster", "machine", "estimate", "assumptions"),
)
