"""Words that people bring from elsewhere: Hugging Face's styles, and what stays in Python."""

from collections.abc import Mapping

from autoshard.dsl.globs import Glob
from autoshard.model_facts import ModelFacts

# Hugging Face's names for styles, and what they are here.
HF_STYLES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "colwise": ("colwise", {}),
    "colwise_gather_output": ("colwise", {"gather": True}),
    "colwise_rep": ("colwise", {"gather": True}),
    "packed_colwise": ("colwise", {"parts": 2}),
    "embedding_colwise": ("colwise", {}),
    "rowwise": ("rowwise", {}),
    "rowwise_rep": ("rowwise", {}),
    "rowwise_split_input": ("rowwise", {"split_input": True}),
    "packed_rowwise": ("rowwise", {"parts": 2}),
    "embedding_rowwise": ("vocab", {}),
    "grouped_gemm": ("experts", {}),
    "moe_tp_experts": ("experts", {}),
    "ep_dispatch_experts": ("experts", {}),
    "replicate": ("replicate", {}),
    "local_params": ("replicate", {}),
    "replicated_with_grad_allreduce": ("replicate", {"grad": "sum"}),
    "mla_kv_a_proj": ("replicate", {}),  # their gradients are summed where they must be anyway
}
# What `use transformers.tp_plan` leaves whole on every rank: right, and said as a warning.
EXPERTS = "experts aren't split yet: they stay whole on every rank"
HF_WHOLE: Mapping[str, str] = {
    **dict.fromkeys(("grouped_gemm", "moe_tp_experts", "ep_dispatch_experts"), EXPERTS),
    "ep_router": "the router stays whole on every rank",
    "moe_identity_expert": "identity experts stay on every rank",
    "all_reduce": "sums are derived from the styles of the layers before",
    "sequence_parallel": "norms stay whole; `sequence_parallel = on` splits what they compute on",
}
# Those without a counterpart here, and what to do instead.
HF_REFUSED: Mapping[str, str] = {
    "all_reduce": "drop this rule: sums are derived from the styles of the layers before",
    "moe_identity_expert": "drop this rule: identity experts stay on every rank",
    "sequence_parallel": "write `sequence_parallel = on` in `tensor`",
}
USES = ("transformers.tp_plan",)

# Words people bring from configurations that hold the optimizer too.
IN_PYTHON = "the optimizer and clipping stay in your Python code"
STAYS_IN_PYTHON: Mapping[str, str] = {
    **dict.fromkeys(
        ("gradient_clipping", "max_grad_norm", "clip_grad", "clip_grad_norm", "grad_clip", "clip"),
        f"{IN_PYTHON}: see `engine.clip_grad_norm_`",
    ),
    **dict.fromkeys(
        ("optimizer", "optim"),
        "the optimizer stays in your Python code; tell the memory estimate with "
        "`assume { optimizer = adamw }`",
    ),
    **dict.fromkeys(
        (
            "lr",
            "learning_rate",
            "weight_decay",
            "betas",
            "eps",
            "scheduler",
            "lr_scheduler",
            "warmup",
            "momentum",
        ),
        f"{IN_PYTHON}: any elementwise optimizer of torch.optim takes `engine.parameters()`",
    ),
    **dict.fromkeys(
        ("data_loader", "dataset", "dataloader", "seed", "epochs", "steps", "train_steps"),
        "data and the training loop stay in your Python code",
    ),
}


def left_whole(glob: str, style: str, facts: ModelFacts) -> str:
    """Return why what a Hugging Face plan gives a style to stays whole here, "" where it doesn't.

    Weights of all experts stacked in one tensor bear the styles of plain layers there.
    """
    named = Glob(glob)
    stacked = (fqn for fqn, param in facts.params.items() if len(param.shape) == 3)
    return HF_WHOLE.get(style) or (EXPERTS if any(map(named.matches, stacked)) else "")
