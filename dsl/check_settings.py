"""What can be wrong between settings that are each right by themselves; needs no model."""

from collections.abc import Iterator

from autoshard.diagnostics import Diagnostic, Severity
from autoshard.dsl.fit_mesh import Fitted
from autoshard.plan import Call, Plan

ONLY_STAGE_3 = (
    "units",
    "prefetch",
    "reshard_after_forward",
    "max_gathered",
    "keep_gathered",
    "gather_bucket",
    "param_persistence_threshold",
    "offload_params",
)
WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes
ONE_STAGE_PER_RANK = ("gpipe", "1f1b", "zb_h1", "zb_h2", "zb_2p")
TWO_STAGES_PER_RANK = ("zbv", "dualpipev")
ZERO_BUBBLE = ("zb_h1", "zb_h2", "zb_2p", "zbv", "dualpipev")


def check_settings(plan: Plan, fitted: Fitted) -> list[Diagnostic]:
    """Return what is wrong or useless in the blocks of settings."""
    checks = (_precision, _zero, _pipeline, _stages, _useless_blocks, _nodes, _sequence)
    return [found for check in checks for found in check(plan, fitted)]


def warning(
    code: str, message: str, plan: Plan, place: str, label: str = "", *help: str
) -> Diagnostic:
    """Return a warning at a setting; `place` may be `block.setting:key` for its name."""
    return Diagnostic(
        code, message, plan.span(place), label, tuple(help), severity=Severity.WARNING
    )


def _precision(plan: Plan, fitted: Fitted) -> Iterator[Diagnostic]:
    precision = plan.precision
    half = [name for name in ("params", "compute") if getattr(precision, name) == "fp16"]
    if half and precision.loss_scale is None:
        help = (f"add `loss_scale = dynamic`, or use `{half[0]} = bf16`",)
        span = plan.span(f"precision.{half[0]}")
        yield Diagnostic("AS501", "fp16 needs a loss scale", span, "range is +-65504", help)
    if WIDTH[precision.master] < WIDTH[precision.params]:
        message = f"`master = {precision.master}` is narrower than `params = {precision.params}`"
        help = (f"`master = {precision.params}`, or leave it at fp32",)
        span = plan.span("precision.master")
        yield Diagnostic("AS503", message, span, "the optimizer would lose digits", help)
    if precision.loss_scale is not None and not half:
        message = "`loss_scale` has no effect without fp16"
        label = f"params are {precision.params}"
        yield warning("AS502", message, plan, "precision.loss_scale:key", label)


def _zero(plan: Plan, fitted: Fitted) -> Iterator[Diagnostic]:
    zero = plan.zero
    for name in ONLY_STAGE_3 if zero.stage < 3 else ():
        if plan.key_span(f"zero.{name}"):
            message = f"`{name}` has no effect below stage 3"
            yield warning("AS311", message, plan, f"zero.{name}:key", f"stage is {zero.stage}")
    if zero.keep_gathered and zero.reshard_after_forward != "on":
        message = "`keep_gathered` has no effect: nothing is released after the forward pass"
        label = f"reshard_after_forward is {zero.reshard_after_forward}"
        yield warning("AS311", message, plan, "zero.keep_gathered:key", label)
    if zero.group == "dp_shard" and "dp_shard" not in plan.mesh:
        help = ("name the axes `dp_replicate` and `dp_shard` in `mesh`, or write `group = dp`",)
        message = "the mesh has no axis `dp_shard`"
        yield Diagnostic("AS313", message, plan.span("zero.group"), "", help)
    elif zero.stage and fitted.size(zero.group) == 1:
        message = f"`stage = {zero.stage}` has no effect with {zero.group} = 1"
        yield warning("AS311", message, plan, "zero.stage:key", "one rank has all of it")
    if zero.stage and zero.group == "dp" and (plan.mesh.get("dp_replicate") or 1) != 1:
        yield warning(
            "AS311",
            "`dp_replicate` keeps no copies: `zero` shares over all data parallel ranks",
            plan,
            "mesh.dp_replicate:key",
            "",
            "`group = dp_shard` in `zero` keeps a copy in each group of `dp_shard` ranks",
        )
    if zero.stage == 3 and (fitted.size("pp") or 2) > 1 and zero.reshard_after_forward != "step":
        yield warning(
            "AS310",
            "zero 3 with a pipeline gathers every parameter once per microbatch",
            plan,
            "zero.stage",
            f"{plan.batch.num_microbatches or 1} microbatches per step",
            "`stage = 1` keeps parameters whole and still shares the optimizer's state",
            "`reshard_after_forward = step` gathers once per step and keeps the parameters",
        )


def _pipeline(plan: Plan, fitted: Fitted) -> Iterator[Diagnostic]:
    """Check that the schedule can do with so many stages per rank."""
    pipeline = plan.pipeline
    schedule, virtual = pipeline.schedule, pipeline.virtual_stages
    if isinstance(schedule, Call) or plan.is_faulty("pipeline.schedule"):
        return
    place = "pipeline.virtual_stages" if virtual > 1 else "pipeline.schedule"
    wrong = help = ""
    if schedule in ONE_STAGE_PER_RANK and virtual > 1:
        wrong, help = "one stage per rank", "`schedule = interleaved_1f1b` takes several"
    elif schedule in TWO_STAGES_PER_RANK and virtual != 2:
        wrong, help = "two stages per rank", "write `virtual_stages = 2`"
    elif schedule == "interleaved_1f1b" and virtual == 1:
        wrong, help = "two or more stages per rank", "write `virtual_stages = 2`, or `1f1b`"
    if wrong:
        message = f"the schedule {schedule} needs {wrong}"
        label = f"virtual_stages is {virtual}"
        yield Diagnostic("AS309", message, plan.span(place), label, (help,))
    if pipeline.max_in_flight is not None and schedule not in ZERO_BUBBLE:
        message = f"`max_in_flight` has no effect with {schedule}"
        help = f"it limits the zero-bubble schedules: {', '.join(ZERO_BUBBLE)}"
        yield warning("AS311", message, plan, "pipeline.max_in_flight:key", "", help)


def _stages(plan: Plan, fitted: Fitted) -> Iterator[Diagnostic]:
    """Check that the named cuts make as many stages as the mesh has places for.

    A schedule file says itself how many stages a rank holds.
    """
    split, pp = plan.pipeline.split, fitted.size("pp")
    if split.name != "before" or pp is None or pp == 1 or isinstance(plan.pipeline.schedule, Call):
        return
    cuts, virtual = len(split.args), plan.pipeline.virtual_stages
    needed = pp * virtual - 1
    if cuts == needed:
        return
    cut = f"{cuts} cut makes" if cuts == 1 else f"{cuts} cuts make"
    stages = f"pp = {pp} x virtual_stages {virtual}" if virtual > 1 else f"pp = {pp}"
    yield Diagnostic(
        "AS307",
        f"{cut} {cuts + 1} stages, but {stages}",
        plan.span("pipeline.split"),
        f"needs {needed} cut{'s' * (needed > 1)}",
        (
            f"name the first module of each later stage: {needed} path{'s' * (needed > 1)}",
            "or `split = even(...)` / `split = auto(by=flops)`",
        ),
    )


def _useless_blocks(plan: Plan, fitted: Fitted) -> Iterator[Diagnostic]:
    """Warn about blocks for an axis that has one place."""
    if plan.span("pipeline") and fitted.size("pp") == 1:
        yield warning("AS311", "`pipeline` has no effect with pp = 1", plan, "pipeline")
    if (plan.tensor.rules or plan.tensor.uses) and fitted.size("tp") == 1 and _no_experts(plan):
        yield warning("AS311", "`tensor` has no effect with tp = 1", plan, "tensor")


def _no_experts(plan: Plan) -> bool:
    return all(rule.style.name != "experts" for rule in plan.tensor.rules)


def _nodes(plan: Plan, fitted: Fitted) -> Iterator[Diagnostic]:
    """Warn when a tensor parallel group leaves its node."""
    per_node, tp = plan.assume.gpus_per_node, fitted.size("tp")
    if per_node is None or tp is None or tp == 1:
        return
    nodes = len({rank // per_node for rank in fitted.mesh.group(0, "tp")})
    if nodes > 1:
        yield warning(
            "AS312",
            f"a tp group of {tp} spans {nodes} nodes",
            plan,
            "mesh.tp",
            f"gpus_per_node = {per_node}",
            f"keep tp at {per_node} or below: its all-reduces are on the critical path"
            if tp > per_node
            else "make `tp` the last axis of `mesh`: its ranks are then neighbours",
        )


def _sequence(plan: Plan, fitted: Fitted) -> Iterator[Diagnostic]:
    """Check that the tokens divide where sequence parallel splits them."""
    tp, length = fitted.size("tp"), plan.assume.sequence_length
    if not plan.tensor.sequence_parallel or tp is None:
        return
    if tp == 1:
        message = "`sequence_parallel` has no effect with tp = 1"
        yield warning("AS311", message, plan, "tensor.sequence_parallel:key")
    elif length is not None and length % tp:
        message = f"{length} tokens can't be split over tp = {tp}"
        help = (f"pad sequences to {-(-length // tp) * tp} tokens",)
        span = plan.span("assume.sequence_length")
        yield Diagnostic("AS407", message, span, "sequence_parallel is on", help)
