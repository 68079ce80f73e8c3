"""Precision: what computes in which type, and that ranks change no bit of it."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autoshard.cost.traffic import traffic
from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.batch import share_leaves
from autoshard.ir.capture import capture
from autoshard.ir.node_info import info, val
from autoshard.ir.program import Program
from autoshard.mesh import Mesh
from autoshard.passes._precision_policy import Policy, operator_name, policy_of
from autoshard.proof.compute_types import check_compute_types
from autoshard.proof.types import check_types
from autoshard.proof.verdict import Status
from autoshard.source import Source
from autoshard.testing.equivalence import held_values
from autoshard.testing.lockstep import StepRecord, run_lockstep
from autoshard.testing.models import tiny_gpt
from autoshard.verify import verify

ONE_RANK = "mesh { dp = 1 }\nbatch { micro_batch_size = 2, num_microbatches = 2 }"
TWO_RANKS = "mesh { dp = 2 }\nbatch { micro_batch_size = 2 }"
WIDE = ("layer_norm", "softmax", "nll_loss", "cross_entropy")
ZERO_3 = "zero { stage = 3, param_persistence_threshold = 0KiB }"
HALF = "precision { params = bf16 }"


@cache
def built():
    return tiny_gpt(layers=1, width=16, heads=2, batch=4, length=8)


@cache
def captured() -> Program:
    model, batch, loss = built()
    half = {name: value[:2] for name, value in batch.items()}
    return capture(model, half, loss, mesh=Mesh(()), compare=False)


@cache
def program_of(plan: str) -> Program:
    model, batch, loss = built()
    source = load(Source("p.plan", f"autoshard 1\n{plan}\n")).require()
    return compile_plan(model, source, batch, loss, captured=captured()).program


@cache
def train(plan: str, steps: int = 2) -> tuple[StepRecord, ...]:
    model, batch, _ = built()
    program = program_of(plan)
    shares = share_leaves(batch, program.mesh.size("dp"))
    values = held_values(model, program, torch.float32)
    return run_lockstep(program, values, [shares] * steps, max_norm=1.0)


@pytest.mark.parametrize(
    "zero",
    [
        "stage = 0",
        "stage = 1",
        "stage = 2",
        "stage = 3, param_persistence_threshold = 0KiB",
        "stage = 3, param_persistence_threshold = 1KiB, reshard_after_forward = step",
    ],
)
def test_ranks_change_no_bit_of_what_one_process_computes_in_bf16(zero: str) -> None:
    ours = train(f"{TWO_RANKS}\nzero {{ {zero} }}\n{HALF}")
    for step, alone in zip(ours, train(f"{ONE_RANK}\n{HALF}"), strict=True):
        assert torch.equal(step.loss, alone.loss)
        assert torch.equal(step.norm, alone.norm)
        for name, value in alone.grads.items():
            assert torch.equal(step.grads[name], value), name
        for name, value in alone.params.items():
            assert value.dtype is torch.float32
            assert torch.equal(step.params[name], value), name


@pytest.mark.parametrize("precision", ["params = bf16", "compute = bf16"])
def test_training_in_bf16_stays_close_to_float32(precision: str) -> None:
    steps = 8
    ours = train(f"{ONE_RANK}\nprecision {{ {precision} }}", steps)
    plain = train(ONE_RANK, steps)
    gaps = [abs(a.loss / b.loss - 1).item() for a, b in zip(ours, plain, strict=True)]
    assert 0 < max(gaps) < 0.01


def test_norms_softmax_and_losses_read_float32_and_products_bf16() -> None:
    phases = program_of(f"{ONE_RANK}\n{HALF}").stages[0].phases
    seen = set()
    for node in (n for f in phases.values() for n in f.graph.nodes if n.op == "call_function"):
        name = getattr(node.target, "_schema", None)
        name = name.name.split("::")[-1] if name else ""
        read = [val(a).dtype for a in node.all_input_nodes if isinstance(val(a), torch.Tensor)]
        floats = {dtype for dtype in read if dtype.is_floating_point}
        if name in ("mm", "addmm"):
            seen.add("products")
            assert floats == {torch.bfloat16}, node
        elif any(word in name for word in WIDE) and not name.startswith(("add_", "bias_")):
            seen.add(name.removesuffix("_backward").removesuffix("_forward"))
            assert floats == {torch.float32}, node
        if name == "_to_copy":
            assert info(node).role == "cast"
    assert {"products", "native_layer_norm", "nll_loss"} <= seen


def test_a_norm_keeps_its_bf16_input_and_not_the_float32_copy() -> None:
    kept = program_of(f"{ONE_RANK}\n{HALF}").stages[0].phases["F"].named_results("saved")
    norm = {name: val(node) for name, node in kept.items() if "ln_1" in name}
    wide = [v for v in norm.values() if v.dtype is torch.float32 and v.shape[-1] > 1]
    assert norm and not wide


def test_gradients_cross_in_the_type_of_reduce_and_parameters_in_theirs() -> None:
    zero = "zero { stage = 2 }"
    wide = traffic(program_of(f"{TWO_RANKS}\n{zero}"))
    half = traffic(program_of(f"{TWO_RANKS}\n{zero}\nprecision {{ params = bf16 }}"))
    both = traffic(program_of(f"{TWO_RANKS}\n{zero}\nprecision {{ params = bf16, reduce = bf16 }}"))
    payloads = [{row.kind: row.payload_bytes for row in rows} for rows in (wide, half, both)]
    assert payloads[1]["all_gather"] * 2 == payloads[0]["all_gather"]
    assert payloads[1]["reduce_scatter"] == payloads[0]["reduce_scatter"]
    assert payloads[2]["reduce_scatter"] * 2 == payloads[0]["reduce_scatter"]


def test_the_remark_tells_sixteen_from_eighteen_bytes() -> None:
    model, batch, loss = built()
    for grads, nbytes in (("bf16", 16), ("fp32", 18)):
        text = f"autoshard 1\n{ONE_RANK}\nprecision {{ params = bf16, grads = {grads} }}\n"
        plan = load(Source("p.plan", text)).require()
        made = compile_plan(model, plan, batch, loss, until="precision", captured=captured())
        assert any(f"{nbytes} bytes each" in str(remark) for remark in made.remarks)


def test_a_program_in_float64_keeps_its_types() -> None:
    model, batch, loss = built()
    plan = load(Source("p.plan", f"autoshard 1\n{ONE_RANK}\n{HALF}\n")).require()
    made = compile_plan(
        model, plan, batch, loss, until="precision", dtype=torch.float64, captured=captured()
    )
    assert made.program.precision is None
    assert any(r.pass_name == "apply-precision" and r.kind == "missed" for r in made.remarks)


def test_casts_are_erased_from_the_proof() -> None:
    model, batch, loss = built()
    source = load(Source("p.plan", f"autoshard 1\n{TWO_RANKS}\n{ZERO_3}\n{HALF}\n")).require()
    row = {r.link: r for r in verify(model, source, batch, loss, numbers=False).rows}["erasure"]
    assert row.status is Status.PROVED, row


FULL = f"{TWO_RANKS}\nprecision {{ compute = bf16 }}"


@pytest.mark.parametrize(
    ("called", "policy", "said"),
    [
        ("cross_entropy_loss", Policy.WIDEST, "must compute in torch.float32"),
        ("layer_norm", Policy.COMPUTE, "aten.native_layer_norm.default in h.0.ln_1"),
        ("linear", Policy.WIDEST, "must compute in torch.bfloat16"),
    ],
)
def test_an_operator_that_the_pass_takes_for_another_kind_is_seen(
    called: str, policy: Policy, said: str, monkeypatch
) -> None:
    def other(node: torch.fx.Node) -> Policy:
        return policy if operator_name(node) == called else policy_of(node)

    model, batch, loss = built()
    assert check_types(program_of(FULL)).wrong == []
    monkeypatch.setattr("autoshard.passes.apply_precision.policy_of", other)
    source = load(Source("p.plan", f"autoshard 1\n{FULL}\n")).require()
    found = check_types(compile_plan(model, source, batch, loss, captured=captured()).program)
    assert any(said in text for text in found.wrong), found.wrong


def test_a_model_s_own_rounding_is_no_fault() -> None:
    class Rounds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.up(x).float().exp().bfloat16().float() ** 2).mean()

    source = load(Source("p.plan", f"autoshard 1\n{FULL}\n")).require()
    program = compile_plan(Rounds(), source, {"x": torch.randn(4, 4)}).program
    assert list(check_compute_types(program)) == []
