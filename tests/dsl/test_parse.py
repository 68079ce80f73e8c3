"""Syntax: what is accepted, what is refused, and several errors in one run."""

import pytest

from autoshard.dsl.parse import parse
from autoshard.dsl.tree import Block, RuleItem, Scope, Setting
from autoshard.source import Source
from tests.dsl.plans import codes, only, read


def items(body: str) -> tuple:
    """Return the items of the one block of a plan."""
    parsed = parse(Source("t.plan", f"autoshard 1\n{body}"))
    assert not parsed.diagnostics
    (block,) = parsed.file.statements
    assert isinstance(block, Block)
    return block.items


def test_settings_and_rules_may_share_a_line() -> None:
    found = items("tensor { sequence_parallel = off; a.b: colwise, c: rowwise }")
    assert [type(item) for item in found] == [Setting, RuleItem, RuleItem]


def test_the_lines_of_a_python_dictionary_are_rules() -> None:
    (rule,) = items('tensor {\n  "model.layers.*.mlp.up_proj": "colwise",\n}')
    assert (rule.target.text, rule.style.name) == ("model.layers.*.mlp.up_proj", "colwise")


def test_scopes_nest_and_braces_in_paths_are_no_scopes() -> None:
    (scope,) = items("tensor { {enc,dec}.block.* { attn { {q,k}: colwise } } }")
    assert isinstance(scope, Scope) and isinstance(scope.items[0], Scope)
    assert scope.items[0].items[0].target.text == "{q,k}"


def test_lists_and_options_may_span_lines() -> None:
    (rule,) = items("recompute {\n h: selective(save=[\n  attention,  # why\n  matmul,\n ])\n}")
    assert [word.text for word in rule.style.args[0].value.items] == ["attention", "matmul"]


@pytest.mark.parametrize("word", ["letter", "user", "dropout", "onward", "includes"])
def test_a_path_may_begin_like_a_keyword(word: str) -> None:
    assert items(f"tensor {{ {word}: colwise }}")[0].target.text == word


def test_override_may_be_the_name_of_a_setting_or_a_module() -> None:
    assert items("tensor { override: colwise }")[0].mark == ""
    assert items("tensor { override x: colwise }")[0].mark == "override"
    assert isinstance(items("tensor { optional = on }")[0], Setting)


def test_comments_and_line_ends_of_every_kind_are_fine() -> None:
    loaded = load_clean("# first\r\nautoshard 1  # second\r\n\r\nmesh { tp = 2 }\r\n# last")
    assert dict(loaded.plan.mesh) == {"tp": 2}


def load_clean(text: str):
    """Read text that has to be right."""
    from autoshard.dsl.load import load

    loaded = load(Source("t.plan", text))
    assert not loaded.diagnostics
    return loaded


@pytest.mark.parametrize(
    "text", ["", "   \n", "# only a comment\n", "mesh { tp = 2 }", "autoshard"]
)
def test_a_plan_without_a_version_is_refused(text: str) -> None:
    assert only(parse(Source("t.plan", text)).diagnostics).code == "AS003"


def test_another_version_is_refused() -> None:
    assert only(parse(Source("t.plan", "autoshard 2\n")).diagnostics).code == "AS005"


def test_each_broken_item_gives_one_message_and_the_rest_is_read() -> None:
    loaded = read(
        "mesh { tp = 2, dp = 4 + 4, pp = 2 }\n"
        "tensor {\n  a -> colwise\n  b: colwise\n  c: \n}\n"
        "zero { stage = }\n"
    )
    assert codes(loaded.diagnostics) == ["AS001", "AS001", "AS002", "AS002"]
    assert dict(loaded.plan.mesh) == {"tp": 2, "pp": 2}
    assert [rule.glob for rule in loaded.plan.tensor.rules] == ["b"]


def test_a_broken_head_of_a_scope_keeps_what_is_inside() -> None:
    loaded = read("tensor {\n  h.* -> {\n    a: colwise\n  }\n}\n")
    assert codes(loaded.diagnostics) == ["AS001"]
    assert [rule.glob for rule in loaded.plan.tensor.rules] == ["h.*.a"]


def test_an_open_bracket_is_reported_where_it_stands() -> None:
    found = only(read("tensor {\n a: colwise(parts=[q,\n b: rowwise\n}\n").diagnostics)
    assert (found.code, found.span.line, found.span.text) == ("AS004", 3, "[")


def test_an_extra_brace_is_named() -> None:
    found = only(read("mesh { tp = 2 } }\n").diagnostics)
    assert (found.code, found.label) == ("AS002", "no block is open here")


@pytest.mark.parametrize(
    ("body", "help"),
    [
        ("mesh { dp = 4 * 2 }", "plans do no arithmetic"),
        ("mesh { dp = 8 / 2 }", "plans do no arithmetic"),
        ("zero { prefetch = -1 }", "no setting takes a negative number"),
        ("tensor { a => colwise }", "use `:` between a path and its style"),
        ("tensor { 'a': colwise }", "quotes are double"),
        ('tensor { "a: colwise }', "ends on its own line"),
        ("// comment", "comments begin with `#`"),
        ("tensor { h[0..5].a: colwise }", "a segment of its own"),
        ("stage = 3", "stand inside a block"),
    ],
)
def test_common_slips_get_their_own_help(body: str, help: str) -> None:
    found = only(read(body).diagnostics)
    assert help in " ".join(found.help)


def test_hopeless_text_ends_after_some_messages() -> None:
    loaded = read("\n".join(f"a{i} ) ( : = {{" for i in range(500)))
    assert 0 < len(loaded.diagnostics) <= 20
