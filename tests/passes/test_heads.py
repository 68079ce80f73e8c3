"""Attention heads over ranks: every packing, per-head norms, tables; in lock step, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autoshard.frontend import compile_plan
from autoshard.ir.params import Copies
from autoshard.ir.rewrite import Rewriter
from autoshard.ops import library
from autoshard.ops.collectives import all_reduce_within, to_copies
from autoshard.ops.library import spec
from autoshard.proof.norm import check_norm
from autoshard.proof.static import static_rows
from autoshard.proof.types import check_types
from autoshard.proof.verdict import Status
from autoshard.testing.models import Built
from autoshard.testing.runtime_faults import count_replicas
from tests.bank.equal import assert_equal, compare, read, refusal
from tests.bank.models import rows
from tests.passes.attention_toys import LENGTH, WIDTH, ParallelToy, heads_toy

PLAN = """
mesh {{ tp = {tp} }}
batch {{ micro_batch_size = 2 }}
tensor {{ {rules}, o: rowwise }}
"""
LAYOUTS = {
    "concatenated": ("qkv: colwise(parts=[q, kv, kv])", (4, 2)),
    "interleaved": ("qkv: colwise(parts=1)", (4, 4)),
    "grouped": ("qkv: colwise(parts=1)", (4, 2)),
}


def plan(rules: str, tp: int = 2) -> str:
    return PLAN.format(tp=tp, rules=rules)


def assert_trains(built: Built, text: str) -> None:
    """Check two steps of training, and that the proof infers the emitted placements again."""
    model, batch, loss = built
    compiled = compile_plan(model, read(text), batch, loss)
    for row in static_rows(compiled.program, compiled.plain):
        assert row.status is Status.PROVED, str(row)
    assert_equal(built, text)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_packing_trains_as_one_process_does(layout: str) -> None:
    rules, sizes = LAYOUTS[layout]
    assert_trains(heads_toy(layout, *sizes), plan(rules))


WRONG = {
    "equal thirds of unequal parts": (
        "concatenated", "parts=[16, 24, 24]", "32 + 16 + 16 along dim 2",
        "this splits 16 + 24 + 24", "`colwise(parts=[32, 16, 16])` splits each part",
    ),
    "parts of what lies head by head": (
        "interleaved", "parts=3", "taken apart as 4 x 3 x 8",
        "this splits 32 + 32 + 32", "`colwise` without parts keeps whole groups: 4 of 24",
    ),
    "parts of what lies group by group": (
        "grouped", "parts=[q, kv, kv]", "taken apart as 2 x 4 x 8",
        "this splits 32 + 16 + 16", "`colwise` without parts keeps whole groups: 2 of 32",
    ),
    "one piece of several": (
        "concatenated", "parts=1", "32 + 16 + 16 along dim 2",
        "a plain colwise would give rank 0 all of the first part",
        "`colwise(parts=[32, 16, 16])` splits each part",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_parts_are_refused_at_the_later_split(name: str) -> None:
    layout, parts, *texts = WRONG[name]
    sizes = (4, 4) if layout == "interleaved" else (4, 2)
    text = refusal(heads_toy(layout, *sizes), plan(f"qkv: colwise({parts})"))
    assert text.startswith("error[AS403]: `qkv` ")
    assert " --> case.plan:4:10" in text
    assert "its outputs are taken apart at attention_toys.py:" in text
    for part in texts:
        assert part in text


@pytest.mark.parametrize("habit", ["norms", "alibi", "table", "shared"])
def test_what_belongs_to_heads_gets_its_gradient_whole(habit: str) -> None:
    rules = "{q,k,v}_proj: colwise" + (", {q,k}_norm: replicate(grad=sum)" * (habit == "norms"))
    assert_trains(heads_toy("separate", 4, 2, **{habit: True}), plan(rules))


def test_tables_of_a_column_for_each_head_are_split_by_name() -> None:
    rules = "{q,k,v}_proj: colwise, table: heads"
    assert_trains(heads_toy("separate", 4, 2, table=True), plan(rules))


KEPT = "q_proj: colwise, {k,v}_proj: colwise(replicate=%d)"


def test_each_of_two_key_heads_is_kept_on_two_of_four_ranks() -> None:
    built = heads_toy("separate", 4, 2, norms=True)
    model, batch, loss = built
    program = compile_plan(model, read(plan(KEPT % 2, 4)), batch, loss).program
    spec = program.params["k_proj.weight"]
    assert (spec.shape, spec.local_shape(program.mesh)) == ((16, 32), (8, 32))
    assert_trains(built, plan(KEPT % 2, 4))


def test_one_key_head_for_all_ranks_is_whole_on_each() -> None:
    assert_trains(heads_toy("separate", 4, 1), plan(KEPT % 2))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (8, 2)])
def test_one_sample_and_one_head_a_rank_raise_no_alarm(heads: int, kv_heads: int) -> None:
    """Then a view reads in several ways: as tokens, as heads or as samples."""
    model, batch, loss = heads_toy("separate", heads, kv_heads)
    text = plan(KEPT % (4 // kv_heads), 4)
    text = text.replace("size = 2", "size = 1, num_microbatches = 2")
    compiled = compile_plan(model, read(text), batch, loss)
    for row in static_rows(compiled.program, compiled.plain):
        assert row.status is Status.PROVED, str(row)


PACKED = "qkv: colwise(parts=[q, kv, kv], replicate=%d)"


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(4, 2, 4), (4, 1, 2)])
def test_key_heads_of_a_packed_weight_are_kept_on_several_ranks(
    heads: int, kv_heads: int, tp: int
) -> None:
    built = heads_toy("concatenated", heads, kv_heads)
    assert_trains(built, plan(PACKED % (tp // kv_heads), tp))


def test_shards_of_a_packed_weight_with_copies_train_as_one_process_does() -> None:
    text = plan(PACKED % 2, 4).replace("tp = 4", "dp = 2, tp = 4").replace("size = 2", "size = 1")
    zero = "zero { stage = 3, param_persistence_threshold = 0KiB }"
    assert_equal(heads_toy("concatenated", 4, 2), f"{text}\n{zero}", steps=1)


def test_queries_that_the_model_puts_elsewhere_are_refused_at_the_later_split() -> None:
    wrong = PACKED.replace("[q, kv, kv]", "[16, 24, 24]") % 2
    text = refusal(heads_toy("concatenated", 4, 2), plan(wrong, 4))
    assert (
        "error[AS403]: `qkv` is not packed as `parts` says: the model takes 0 to 32 of 64" in text
    )
    assert "this splits 16 + 24 + 24" in text and "attention_toys.py:" in text
    text = refusal(heads_toy("grouped", 4, 2), plan(PACKED % 2, 4))
    assert "error[AS402]: `qkv` has no 2 heads that 2 ranks can keep each" in text
    text = refusal(heads_toy("concatenated", 4, 2), plan(PACKED % 3, 4))
    assert "error[AS402]" in text


def test_gradients_of_packed_copies_that_are_summed_wrongly_are_a_type_error() -> None:
    """Plant two faults: nothing is summed, or the queries' rows are summed too."""
    for broken in (lambda node: node.args[0], lambda node: node):
        model, batch, loss = heads_toy("concatenated", 4, 2)
        program = compile_plan(model, read(plan(PACKED % 2, 4)), batch, loss).program
        for function in program.stages[0].phases.values():
            for node in function.graph.find_nodes(op="call_function", target=all_reduce_within):
                node.args = node.args[:3]
                if broken(node) is not node:
                    Rewriter(function, "fault").replace(node, node.args[0])
        wrong = "\n".join(check_types(program).wrong)
        assert "grad 'qkv.weight'" in wrong
        assert "is not summed once over the 2 ranks that keep the same head" in wrong


def test_a_gradient_that_every_copy_gets_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant the fault: the only head's gradient counts once for each rank."""
    given = replace(spec(to_copies), run=lambda comm, x, *rest: x)
    monkeypatch.setitem(library._specs, to_copies, given)
    built = heads_toy("concatenated", 4, 1)
    assert compare(built, plan(PACKED % 2, 2), steps=1).first_wrong() is not None


def test_copies_that_count_twice_in_the_norm_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, loss = heads_toy("concatenated", 4, 2)
    program = compile_plan(model, read(plan(PACKED % 2, 4)), batch, loss).program
    assert not list(check_norm(program))
    with count_replicas():
        assert "the norm counts piece 0, shard 0 of 'qkv.weight' 2 times" in check_norm(program)


def test_packed_copies_are_the_models_own_value_again() -> None:
    copies = Copies(dim=0, pieces=2, times=3, own=4, parts=2)
    value = torch.arange(12.0).reshape(12, 1)
    wide = copies.repeat(value)
    kept = [4, 5] * 3 + [6, 7] * 3 + [8, 9] * 3 + [10, 11] * 3
    assert wide.flatten().tolist() == [0, 1, 2, 3, *kept]
    assert wide.shape[0] == copies.lengthened(12)
    assert torch.equal(copies.first(wide), value)


def test_copies_that_are_not_tp_over_key_heads_are_refused() -> None:
    text = refusal(heads_toy("separate", 8, 4), plan(KEPT % 2, 4))
    assert "error[AS402]: 4 key/value heads can't be split over tp = 4" in text


def test_gradients_of_kept_heads_that_stay_apart_are_a_type_error() -> None:
    model, batch, loss = heads_toy("separate", 4, 2)
    program = compile_plan(model, read(plan(KEPT % 2, 4)), batch, loss).program
    for function in program.stages[0].phases.values():
        for node in function.graph.find_nodes(op="call_function", target=all_reduce_within):
            Rewriter(function, "fault").replace(node, node.args[0])
    wrong = "\n".join(check_types(program).wrong)
    assert "is not summed once over the 2 ranks that keep the same head" in wrong


def test_a_row_layer_may_read_what_two_split_layers_made() -> None:
    torch.manual_seed(0)
    built = rows(ParallelToy(), 2, LENGTH, WIDTH)
    rules = "a: colwise, b: colwise, out: rowwise(parts=[16, 64])"
    text = PLAN.replace(", o: rowwise", "").format(tp=2, rules=rules)
    assert_trains(built, text)
