"""Rules against a model: what they match, who wins, and shapes that don't divide."""

import pytest

from autoshard.diagnostics import NotExecutableError, PlanError
from autoshard.dsl.resolve import resolve
from tests.dsl.plans import LAYERS, codes, examined, model, only, read

TP2 = "mesh { tp = 2 }\n"
MLP = "h.*.mlp.up: colwise\n h.*.mlp.down: rowwise\n"


def tensor(rules: str, tp: int = 2, facts=None):
    """Examine tensor rules against the small model."""
    return examined(f"mesh {{ tp = {tp} }}\ntensor {{ {rules} }}", facts or model())


def test_rules_bind_to_modules_in_the_order_of_the_model() -> None:
    resolved = tensor(MLP).resolved
    assert list(resolved.tensor)[:3] == ["h.0.mlp.up", "h.0.mlp.down", "h.1.mlp.up"]
    assert len(resolved.tensor) == 2 * LAYERS
    bound = resolved.tensor["h.0.mlp.down"]
    assert (bound.style, bound.options, bound.rule.glob) == ("rowwise", {}, "h.*.mlp.down")
    assert bound.rule.span.line == 4


def test_an_override_wins_and_its_rule_is_the_one_that_binds() -> None:
    found = tensor("h.*.mlp.up: colwise\n override h.0.mlp.up: replicate")
    assert found.diagnostics == ()
    assert found.resolved.tensor["h.0.mlp.up"].style == "replicate"
    assert found.resolved.tensor["h.1.mlp.up"].style == "colwise"


def test_two_rules_without_override_are_an_error() -> None:
    found = only(tensor("h.*.mlp.up: colwise\n h.[1..2].mlp.up: rowwise").errors)
    assert (found.code, found.message) == (
        "AS203",
        "two rules claim `h.1.mlp.up` and 1 more",
    )
    assert found.secondary[0].text == "colwise here"


def test_an_override_must_stand_below_what_it_overrides() -> None:
    found = tensor("override h.0.mlp.up: replicate\n h.*.mlp.up: colwise")
    assert codes(found.diagnostics) == ["AS208", "AS203"]


def test_a_rule_that_matches_nothing_is_an_error_unless_optional() -> None:
    found = only(tensor("h.*.mlp.upp: colwise").errors)
    assert found.code == "AS201"
    assert found.help[0] == "did you mean `h.*.mlp.up`? (4 matches)"
    assert found.notes == ("`h.*.mlp` matches 4 modules; below it: act, down, up",)
    assert tensor("optional h.*.mlp.upp: colwise").diagnostics == ()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("h.*.mpl.up", "h.*.mlp.up"),
        ("h.[0..2].mlp.upp", "h.[0..2].mlp.up"),
        ("h.1.mlp.donw", "h.1.mlp.down"),
        ("model.h.*.mlp.up", "h.*.mlp.up"),
        ("h.*.up", "h.*.mlp.up"),
        ("h.*.ffn.mlp.down", "h.*.mlp.down"),
        ("heads", "head"),
    ],
)
def test_a_wrong_path_is_answered_with_the_nearest_layer(wrong: str, right: str) -> None:
    assert f"`{right}`" in only(tensor(f"{wrong}: colwise").errors).help[0]


def test_a_path_that_is_like_nothing_gets_no_guess() -> None:
    found = only(tensor("encoder.zzz.qqq.www: colwise").errors)
    assert not found.help[0].startswith("did you mean")
    assert found.notes == ("Tiny has: h, head, wpe, wte",)


def test_a_dead_alternative_is_a_warning() -> None:
    found = only(tensor("h.*.mlp.{up,gate}: colwise").diagnostics)
    assert (found.code, found.severity.value) == ("AS214", "warning")
    assert "`gate`" in found.message
    assert codes(tensor(f"h.[2..{LAYERS}].mlp.up: colwise").diagnostics) == ["AS214"]
    assert tensor("optional h.*.mlp.{up,gate}: colwise").diagnostics == ()


def test_an_empty_range_is_named() -> None:
    assert codes(tensor("h.[3..1].mlp.up: colwise").errors) == ["AS211"]


def test_a_rule_may_name_a_parameter() -> None:
    assert list(tensor("h.0.mlp.up.weight: colwise").resolved.tensor) == ["h.0.mlp.up.weight"]


@pytest.mark.parametrize(
    ("rule", "code", "word"),
    [
        ("h.*.mlp.*: colwise", "AS207", "`h.*.mlp.{down,up}`"),
        ("h.*.mlp: colwise", "AS207", "act, down, up"),
        ("h.*.mlp.act: colwise", "AS207", "remove it"),
        ("h.*.ln: colwise", "AS210", "a norm stays whole"),
        ("wpe: rowwise", "AS210", "`vocab` splits the rows"),
        ("h.*.attn.qkv: colwise", "AS403", "`colwise(parts=3)`"),
        ("h.*.attn.qkv: colwise(parts=5)", "AS406", "parts one of"),
        ("h.*.attn.qkv: colwise(parts=[q, kv, kv])", "AS406", "32 + 16 + 16 make 64, not 96"),
        ("wte: vocab", "AS401", "`vocab(pad=128)` pads it to 256"),
    ],
)
def test_a_style_that_does_not_fit_its_layer(rule: str, code: str, word: str) -> None:
    found = tensor(rule, facts=model(tie=False)).errors[0]
    assert found.code == code
    assert word in " ".join([found.message, found.label, *found.help])


def test_the_attention_around_q_k_v_is_said_to_need_no_rule() -> None:
    found = only(tensor("h.*.cross: colwise").errors)
    assert "attention as a whole needs no rule" in found.notes[0]


@pytest.mark.parametrize(
    ("rule", "tp", "message"),
    [
        ("h.*.cross.q_proj: colwise", 16, "8 query heads can't be split over tp = 16"),
        ("h.*.cross.k_proj: colwise", 8, "4 key/value heads can't be split over tp = 8"),
        ("h.*.mlp.up: colwise", 3, "128 outputs can't be split over tp = 3"),
        ("h.*.mlp.down: rowwise", 3, "128 inputs can't be split over tp = 3"),
        ("h.*.mlp.down.weight: colwise", 3, "32 outputs can't be split over tp = 3"),
        ("wpe: colwise", 3, "32 outputs can't be split over tp = 3"),
    ],
)
def test_what_does_not_divide_is_told_with_its_numbers(rule: str, tp: int, message: str) -> None:
    found = only(tensor(rule, tp).errors)
    assert found.message == message
    assert found.help


@pytest.mark.parametrize(
    ("rule", "tp"),
    [
        ("h.*.cross.k_proj: colwise(replicate=2)", 8),
        ("h.*.cross.{q,k}_proj: colwise", 4),
        ("h.*.attn.qkv: colwise(parts=3)", 4),
        ("h.*.attn.qkv: colwise(parts=1)", 4),
        ("h.*.attn.qkv: colwise(parts=[32, 32, 32])", 4),
        ("wte: vocab(pad=64), head: vocab(pad=64)", 2),
        ("h.*.mlp.up: colwise(pad=1)", 3),
        ("h.*.ln: replicate", 2),
    ],
)
def test_what_fits_is_not_complained_about(rule: str, tp: int) -> None:
    assert tensor(rule, tp).diagnostics == ()


def test_shapes_are_not_checked_where_nothing_is_split() -> None:
    assert codes(tensor("h.*.attn.qkv: colwise\n wte: vocab", tp=1).diagnostics) == ["AS311"]


def test_shapes_are_not_checked_while_tp_is_unknown_but_packing_is() -> None:
    body = "mesh { tp = auto }\ntensor { h.*.mlp.up: colwise, h.*.attn.qkv: colwise }"
    assert codes(examined(body, model()).errors) == ["AS403"]


@pytest.mark.parametrize(
    ("rules", "label"),
    [
        ("wte: vocab(pad=1)", "vocab(pad=1) here; `head` has no rule"),
        ("wte: vocab(pad=1), head: rowwise", "vocab(pad=1) here; `head` is rowwise"),
        ("wte: vocab(pad=1), head: vocab(pad=2)", "vocab(pad=1) here; `head` is vocab(pad=2)"),
    ],
)
def test_tied_weights_need_one_split(rules: str, label: str) -> None:
    found = only(tensor(rules).errors)
    assert (found.code, found.label) == ("AS404", label)


def test_tied_weights_may_differ_in_what_does_not_change_their_storage() -> None:
    assert tensor("wte: vocab(pad=1), head: colwise(gather, pad=1)").diagnostics == ()
    assert tensor("wte: replicate").diagnostics == ()


def test_use_takes_over_the_rules_of_the_model() -> None:
    facts = model(tie=False)
    found = tensor("use transformers.tp_plan\n override head: vocab(pad=1)", facts=facts)
    assert found.diagnostics == ()
    assert found.resolved.tensor["h.0.mlp.up"].style == "colwise"
    assert found.resolved.tensor["head"].style == "vocab"


def test_a_rule_beside_use_needs_override() -> None:
    found = tensor("use transformers.tp_plan\n head: vocab(pad=1)", facts=model(tie=False))
    assert codes(found.errors) == ["AS203"]


def test_use_of_what_is_not_there_is_refused() -> None:
    from dataclasses import replace

    none = replace(model(), hf_tp_plan={})
    assert codes(tensor("use transformers.tp_plan", facts=none).errors) == ["AS205"]
    odd = replace(model(), hf_tp_plan={"h.*.mlp.up": "a_new_style"})
    found = only(tensor("use transformers.tp_plan", facts=odd).errors)
    assert (found.code, "a_new_style" in found.message) == ("AS212", True)
    assert codes(read("tensor { use transformers.plan }").errors) == ["AS213"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("zero { stage = 3, units = h.*.mlpp }", "AS201"),
        ("pipeline { split = before(h.9) }", "AS201"),
        ("pipeline { split = before(h.*) }", "AS308"),
        ("pipeline { split = even(head) }", "AS308"),
        ("recompute { h.*.mpl: full }", "AS201"),
    ],
)
def test_paths_in_settings_are_checked_too(body: str, code: str) -> None:
    found = examined(f"mesh {{ pp = 2, dp = 2 }}\n{body}", model()).errors
    assert code in codes(found)


def test_recompute_rules_may_name_any_module() -> None:
    found = examined("recompute { h.*: full\n override h.3: none }", model())
    assert found.diagnostics == ()
    assert {p: r.style for p, r in found.resolved.recompute.items()} == {
        "h.0": "full",
        "h.1": "full",
        "h.2": "full",
        "h.3": "none",
    }


def test_without_a_model_only_equal_paths_conflict() -> None:
    body = TP2 + "tensor { a: colwise\n a: rowwise\n a*: colwise }"
    assert codes(examined(body).errors) == ["AS203"]
    assert examined(TP2 + "tensor { override a.[0..1]: colwise }").diagnostics == ()


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("precision { params = bf16 }", []),
        ("mesh { ep = 2 }", ["mesh.ep = 2"]),
        ("tensor { h.*.mlp.up: experts }", ["tensor style `experts`"]),
        ("tensor { h.*.mlp.up: colwise(replicate=2, pad=1) }", []),
        ("tensor { h.*.mlp.up: heads, h.*.ln: replicate(grad=sum) }", []),
        ("recompute { h.*: full }", []),
        ("zero { offload_optimizer = cpu, offload_params = cpu }", []),
        ("tensor { h.*.mlp.up: colwise(pad=1) }", []),
        ("pipeline { split = even(h.*), schedule = gpipe }", []),
    ],
)
def test_what_cannot_run_yet_is_listed_and_refused_on_request(body: str, named: list) -> None:
    resolved = examined(body).resolved
    listed = [text for text, _ in resolved.not_executable]
    planned = [text for text in listed if text not in named]
    assert [text for text in named if text not in listed] == []
    if not listed:
        resolved.require_executable()
        return
    assert not planned
    with pytest.raises(NotExecutableError, match="planned, not executable yet"):
        resolved.require_executable()


def test_resolve_raises_with_every_error() -> None:
    plan = read(TP2 + "tensor { h.*.mlpp.up: colwise\n h.*.attn.qkv: colwise }").require()
    with pytest.raises(PlanError) as caught:
        resolve(plan, model(), 4)
    assert codes(caught.value.diagnostics) == ["AS302", "AS201", "AS403"]
