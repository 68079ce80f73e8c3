"""Blocks and settings: kinds of values, misspelt words, what stands in the wrong place."""

import pytest

from autoshard.dsl.schema import BLOCK
from autoshard.plan import Call
from autoshard.units import Size
from tests.dsl.plans import codes, only, read


def test_values_are_typed() -> None:
    plan = read(
        "zero { stage = 3, units = [h.*, x], reduce_bucket = 5MB, reshard_after_forward = step }\n"
        "tensor { sequence_parallel = on }\n"
        'pipeline { split = before(h.1, h.2), schedule = csv("a.csv") }\n'
        "recompute { budget = 50% }\n"
        "assume { intra_node = 300GB/s, sequence_length = 8 }\n"
        "precision { params = fp16, loss_scale = 1024 }\n"
    ).require()
    assert (plan.zero.stage, plan.zero.units, plan.zero.reduce_bucket) == (
        3,
        ("h.*", "x"),
        Size(5_000_000),
    )
    assert plan.tensor.sequence_parallel is True
    assert plan.pipeline.split == Call("before", ("h.1", "h.2"))
    assert plan.pipeline.schedule == Call("csv", ("a.csv",))
    assert (plan.recompute.budget, plan.assume.intra_node) == (0.5, 300e9)
    assert (plan.precision.compute, plan.precision.loss_scale) == ("fp16", 1024.0)


def test_a_setting_knows_its_line() -> None:
    plan = read("zero {\n  stage = 3\n}\n").require()
    assert (plan.span("zero.stage").line, plan.span("zero.stage").text) == (3, "3")
    assert plan.key_span("zero.stage").text == "stage"
    assert plan.span("zero").text == "zero"
    assert plan.span("zero.prefetch") is None


@pytest.mark.parametrize(
    ("body", "code", "word"),
    [
        ("zero { prefetch = on }", "AS120", "this is a word"),
        ("zero { stage = 4 }", "AS123", "from 0 to 3"),
        ("zero { stage = 1.5 }", "AS120", "whole number"),
        ("mesh { tp = 0 }", "AS123", "whole number of at least 1 or `auto`"),
        ("mesh { tp = 99999999999999999999999999 }", "AS123", "whole number of at most"),
        ("zero { reduce_bucket = 25 }", "AS121", "`25MB`"),
        ("zero { reduce_bucket = 25mb }", "AS121", "did you mean `MB`"),
        ("zero { reduce_bucket = 0.3B }", "AS123", "not a whole number"),
        ("zero { reduce_bucket = 9e99TB }", "AS123", "larger than any memory"),
        ("assume { hbm = 80Gelems }", "AS121", "no unit of storage"),
        ("recompute { budget = 200% }", "AS123", "0% to 100%"),
        ("tensor { sequence_parallel = true }", "AS122", "did you mean `on`"),
        ("precision { params = bfloat16 }", "AS122", "did you mean `bf16`"),
        ("pipeline { schedule = 1F1B }", "AS122", "did you mean `1f1b`"),
        ("pipeline { split = even() }", "AS124", "even(PATH, ...)"),
        ("pipeline { split = even }", "AS120", "even(PATH, ...)"),
        ("pipeline { split = auto(by=time) }", "AS122", "flops"),
        ("zero { units = [h.*, 3] }", "AS120", "module path"),
        ("assume { intra_node = 300GB }", "AS121", "GB/s"),
        ("precision { loss_scale = 0 }", "AS120", "above 0"),
    ],
)
def test_a_wrong_value_says_what_is_right(body: str, code: str, word: str) -> None:
    found = only(read(body).errors)
    assert found.code == code
    assert word in " ".join([found.message, found.label, *found.help, *found.notes])


@pytest.mark.parametrize("block", BLOCK.values(), ids=BLOCK)
def test_other_systems_words_are_answered_with_ours(block) -> None:
    for setting in block.settings:
        for word in setting.synonyms:
            found = read(f"{block.name} {{ {word} = 1 }}").errors[0]
            assert found.code == "AS101"
            assert found.help == (f"did you mean `{setting.name}`?",), word


def test_other_systems_blocks_are_answered_with_ours() -> None:
    for block in BLOCK.values():
        for word in block.synonyms:
            found = only(read(f"{word} {{ }}").errors)
            assert found.help[0].startswith("did you mean"), word


def test_a_setting_in_the_wrong_block_is_sent_to_its_own() -> None:
    found = only(read("batch { loss_scale = dynamic }").errors)
    assert "`precision` has this setting" in found.help[0]


def test_what_stays_in_python_is_told_so() -> None:
    found = read("batch { lr = 0.1, max_grad_norm = 1 }\noptimizer { }").errors
    assert all("Python code" in diagnostic.help[0] for diagnostic in found)


def test_settings_and_rules_are_not_mixed_up() -> None:
    assert only(read("tensor { a.b = colwise }").errors).help == ("write `a.b: colwise`",)
    assert only(read("tensor { h.* { up = colwise } }").errors).code == "AS104"
    assert only(read("tensor { sequence_parallel: on }").errors).code == "AS105"
    assert only(read("zero { group: dp }").errors).help == ("write `group = dp`",)
    assert "`stage = 3`" in only(read("zero { stage: 3 }").errors).help[0]
    assert only(read("zero { h.*: full }").errors).code == "AS106"
    assert only(read("zero { use transformers.tp_plan }").errors).code == "AS106"
    assert "close `zero`" in only(read("zero { batch { } }").errors).help[0]


def test_a_file_says_each_thing_once() -> None:
    assert codes(read("zero { stage = 1 }\nzero { prefetch = 1 }").errors) == ["AS102"]
    assert codes(read("zero { stage = 1, stage = 2 }").errors) == ["AS103"]


def test_block_on_something_is_reserved() -> None:
    assert only(read("precision on cpu { params = fp32 }").errors).code == "AS107"


def test_variables_are_substituted_anywhere_in_a_value() -> None:
    plan = read(
        "let a = h.*\nlet both = [$a, x]\nzero { units = $both }\npipeline { split = even($a) }\n"
    ).require()
    assert plan.zero.units == ("h.*", "x")
    assert plan.pipeline.split.args == ("h.*",)


def test_variables_are_known_below_their_definition_only() -> None:
    found = only(read("zero { units = $layer }\nlet layers = h.*").errors)
    assert (found.code, found.label) == ("AS110", "not defined above")
    near = read("let layers = h.*\nzero { units = $layer }").errors[0]
    assert near.help[0] == "did you mean `$layers`?"
    assert codes(read("let a = 1\nlet a = 2\nbatch { micro_batch_size = $a }").errors) == ["AS111"]


def test_a_variable_that_nothing_uses_is_a_warning() -> None:
    loaded = read("let layers = h.*\nzero { stage = 1 }")
    assert not loaded.errors
    assert codes(loaded.diagnostics) == ["AS112"]
