"""Heads that don't divide, padded by whole heads of zeros; in lock step, in float64."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.diagnostics import VerifyError
from autoshard.frontend import compile_plan
from autoshard.ir.padding import Padding, has_slope, makes_zeros
from autoshard.ir.program import Program
from autoshard.proof.erasure import check_erasure
from autoshard.proof.static import static_rows
from autoshard.proof.types import check_types
from autoshard.proof.verdict import Status
from autoshard.runtime.control import Control
from autoshard.runtime.state_dict import gather_state, load_state
from autoshard.testing.lockstep import run_lockstep, run_ranks
from autoshard.testing.models import Built, tiny_gpt, tiny_hf
from tests.bank.equal import assert_equal, read, refusal
from tests.bank.models import rows
from tests.passes.attention_toys import LENGTH, WIDTH, heads_toy

aten = torch.ops.aten
THREE = "{q,k,v}_proj: colwise(pad=8), o: rowwise(pad=8)"
GROUPS = "q_proj: colwise(pad=24), {k,v}_proj: colwise(pad=8), o: rowwise(pad=24)"
GPT = """h.*.attn.qkv: colwise(parts=3, pad=8), h.*.attn.proj: rowwise(pad=8)
    h.*.mlp { up: colwise, down: rowwise }"""
LAYOUTS = {
    "3 heads": ("separate", (3, 3), THREE),
    "9 heads of 3 groups": ("separate", (9, 3), GROUPS),
    "concatenated": (
        "concatenated", (9, 3), "qkv: colwise(parts=[q,kv,kv], pad=8), o: rowwise(pad=24)"
    ),
    "interleaved": ("interleaved", (3, 3), "qkv: colwise(parts=1, pad=24), o: rowwise(pad=8)"),
    "grouped": ("grouped", (9, 3), "qkv: colwise(parts=1, pad=40), o: rowwise(pad=24)"),
}  # fmt: skip


def plan(rules: str, mesh: str = "tp = 2", batch: int = 2, more: str = "") -> str:
    head = f"mesh {{ {mesh} }}\nbatch {{ micro_batch_size = {batch} }}\n"
    return f"{head}tensor {{ {rules} }}\n{more}"


def three(**habits: bool) -> Built:
    return heads_toy("separate", 3, 3, **habits)


def assert_trains(built: Built, text: str) -> Program:
    """Check two steps of training beside the plain model, and that everything is proved."""
    model, batch, loss = built
    compiled = compile_plan(model, read(text), batch, loss)
    for row in static_rows(compiled.program, compiled.plain):
        assert row.status is Status.PROVED, str(row)
    assert_equal(built, text)
    return compiled.program


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_packing_trains_as_one_process_does(name: str) -> None:
    layout, sizes, rules = LAYOUTS[name]
    assert_trains(heads_toy(layout, *sizes), plan(rules))


@pytest.mark.parametrize("habit", ["norms", "alibi", "table"])
def test_what_belongs_to_heads_gets_zeros_for_padded_ones(habit: str) -> None:
    assert_trains(three(**{habit: True}), plan(THREE))


def test_a_rank_may_have_padded_heads_only() -> None:
    program = assert_trains(three(), plan(THREE, "tp = 4"))
    spec = program.params["q_proj.weight"]
    assert (spec.shape, spec.local_shape(program.mesh)) == ((24, WIDTH), (8, WIDTH))


class Mlp(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 15), act, nn.Linear(15, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


def mlp(act: nn.Module) -> Built:
    torch.manual_seed(0)
    return rows(Mlp(act), 2, LENGTH, WIDTH)


def test_a_width_that_does_not_divide_is_padded_too() -> None:
    assert_trains(mlp(nn.GELU()), plan("up: colwise(pad=1), down: rowwise(pad=1)"))


REFUSED = {
    "a layer that reads padded heads and isn't padded": (
        three(), "{q,k,v}_proj: colwise(pad=8), o: rowwise",
        "`q_proj` can't be padded: 'aten.linear.default' reads 32 and its weight has 24",
        "help: give `o` the rule `rowwise(pad=8)`",
    ),
    "query heads by single heads, key heads by groups": (
        heads_toy("separate", 9, 3), THREE,
        "`q_proj` and `k_proj` are padded in different proportions",
        "help: `q_proj: colwise(pad=24)` pads 72 to 96",
    ),
    "keys that divide beside queries that are padded": (
        heads_toy("separate", 4, 4),
        "{q,v}_proj: colwise(pad=24), k_proj: colwise, o: rowwise(pad=24)",
        "`k_proj` meets values that are padded from 4 to 6, and is not padded",
        "help: pad all or none: `colwise(pad=..)` in the same proportion",
    ),
    "padding that ends up as one half": (
        mlp(nn.Sigmoid()), "up: colwise(pad=1), down: rowwise(pad=1)",
        "`up` can't be padded: 'aten.linear.default' sums padding up that is not zero",
        "15 padded to 16",
    ),
    "dropout of padded heads": (
        tiny_gpt(layers=1, width=24, heads=3, dropout=0.5, batch=2, length=4), GPT,
        "`h.0.attn.qkv` can't be padded: 'autoshard.dropout.default' would draw another mask",
        "24 padded to 32",
    ),
    "heads that are kept on several ranks, too": (
        heads_toy("separate", 4, 1), "q_proj: colwise, {k,v}_proj: colwise(replicate=2, pad=8)",
        "`k_proj` can't have `pad` beside `replicate`",
        "help: heads that are kept on several ranks divide: leave `pad` out",
    ),
    "half heads": (
        three(), "{q,k,v}_proj: colwise(pad=6), o: rowwise(pad=6)",
        "3 heads can't be split over tp = 2",
        "`colwise(pad=8)` pads them to 4 (checkpoints keep 3), with `rowwise(pad=8)`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_padding_that_can_not_be_right_is_refused(name: str) -> None:
    built, rules, *texts = REFUSED[name]
    found = refusal(built, plan(rules))
    assert found.startswith("error[AS402]: ")
    for text in texts:
        assert text in found


MESHES = {
    "sequence parallel": ("tp = 2", f"sequence_parallel = on, {GPT}", ""),
    "pipeline": ("pp = 2, tp = 2", GPT, "pipeline { split = before(h.1) }"),
    "zero 3": ("dp = 2, tp = 2", GPT, "zero { stage = 3 }"),
}


@pytest.mark.parametrize("name", MESHES)
def test_padded_heads_go_with_every_other_axis(name: str) -> None:
    mesh, rules, more = MESHES[name]
    batch = 1 if "dp" in mesh else 2
    built = tiny_gpt(layers=2, width=24, heads=3, vocab=32, batch=2, length=4)
    assert_trains(built, plan(rules, mesh, batch, more))


FAMILIES = {
    "gpt2": "**.c_attn: colwise(parts=3, pad=8), **.attn.c_proj: rowwise(pad=8)",
    "bloom": "**.query_key_value: colwise(parts=1, pad=24), **.dense: rowwise(pad=8)",
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_padded_heads_of_real_families_train(kind: str) -> None:
    """Of a Conv1D; and of batch and heads in one dimension, with a share of ALiBi's for each."""
    built = tiny_hf(kind, layers=1, width=24, heads=3, vocab=32, batch=2, length=4)
    assert_trains(built, plan(FAMILIES[kind]))


def test_state_dicts_have_true_sizes_and_go_from_mesh_to_mesh() -> None:
    model, batch, loss = heads_toy("concatenated", 9, 3)
    names, state = tuple(model.state_dict()), dict(model.state_dict())

    def round_trip(text: str, given: dict) -> dict:
        program = compile_plan(model, read(text), batch, loss).program

        def work(exe) -> dict:
            load_state(program, exe.storage, Control(), names, given)
            return gather_state(program, exe.storage, exe.comm, names)

        return run_ranks(program, {}, work)[1][0]

    rules = LAYOUTS["concatenated"][2]
    for mesh in ("tp = 2", "tp = 1", "tp = 4"):
        state = round_trip(plan(rules, mesh), state)
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name


class Drift(torch.optim.SGD):
    """An optimizer that moves what has no gradient."""

    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data += 1e-3


def test_padding_that_an_optimizer_moves_is_seen() -> None:
    model, batch, loss = mlp(nn.ReLU())
    text = plan("up: colwise(pad=1), down: rowwise(pad=1)")
    program = compile_plan(model, read(text), batch, loss).program
    values = {name: value.detach() for name, value in model.named_parameters()}
    with pytest.raises(VerifyError, match=r"the padding of 'up\.weight' is not zero"):
        run_lockstep(program, values, [[batch]], optimizer=lambda given: Drift(given, lr=0.1))


def test_an_activation_that_fills_padding_is_unproven() -> None:
    """Planted in the compiled program: with a half in the padding the last layer's would train."""
    model, batch, loss = mlp(nn.ReLU())
    text = plan("up: colwise(pad=1), down: rowwise(pad=1)")
    compiled = compile_plan(model, read(text), batch, loss)
    (node,) = (
        compiled.program.stages[0]
        .phases["F"]
        .graph.find_nodes(op="call_function", target=aten.relu.default)
    )
    node.target = aten.sigmoid.default
    placed = check_types(compiled.program).placed["tp"]
    unproven = "\n".join(check_erasure(compiled.program, compiled.plain, placed).unproven)
    assert "the gradient of 'down.weight' is not shown to be zero in its padding" in unproven


ZERO, JUNK = Padding(Fraction(4, 3), is_zero=True), Padding(Fraction(4, 3), is_zero=False)
ZEROS = {
    "relu": (nn.ReLU(), (ZERO,), True),
    "gelu": (nn.GELU(), (ZERO,), True),
    "sigmoid": (nn.Sigmoid(), (ZERO,), False),
    "relu of anything": (nn.ReLU(), (JUNK,), False),
    "plus one": (lambda x: x + 1.0, (ZERO,), False),
    "times anything": (lambda x: x * x.new_ones(6), (ZERO, None), True),
    "plus anything": (lambda x: x + x.new_ones(6), (ZERO, None), False),
    "a product": (lambda x: x @ x.mT, (JUNK, ZERO), True),
    "a product of anything": (lambda x: x @ x.mT, (JUNK, JUNK), False),
}


@pytest.mark.parametrize("name", ZEROS)
def test_zeros_are_followed_through_operators(name: str) -> None:
    op, given, expected = ZEROS[name]
    node = last_call(op)
    assert makes_zeros(node, given) is expected


def test_a_square_root_has_no_slope_at_zero() -> None:
    assert not has_slope(last_call(torch.sqrt), (ZERO,))
    assert has_slope(last_call(torch.exp), (ZERO,)) and has_slope(last_call(torch.sqrt), (JUNK,))


def last_call(op) -> torch.fx.Node:
    graph = make_fx(op)(torch.ones(6, 6)).graph
    return graph.output_node().args[0]
