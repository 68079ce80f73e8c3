"""Diffs of prints: what changed stands together, equal changes of equal blocks are shown once."""

from autoshard.ir.diff import block_of, diff_blocks, render

BEFORE = [
    (f"h.{i}.up", f"h.{i}.up: f32[4, 8] = linear({x}, h.{i}.up.weight)")
    for i, x in enumerate(("add", "h.0.up", "h.1.up"))
]
AFTER = [(path, line.replace("[4, 8]", "[4, 4] S(1)@tp")) for path, line in BEFORE]


def test_a_block_is_the_path_up_to_its_number():
    assert block_of("model.layers.3.mlp.up") == "model.layers.3"
    assert block_of("lm_head") == "lm_head"
    assert block_of("") == ""


def test_the_same_change_of_several_blocks_is_shown_once():
    (diff,) = diff_blocks(BEFORE, AFTER)
    assert diff.block == "h.0"
    assert diff.same_in == ("h.1", "h.2")
    assert "h.0   (the same change in h.1 .. h.2)" in render([diff])


def test_another_change_of_one_block_is_shown_apart():
    other = [*AFTER[:2], (AFTER[2][0], AFTER[2][1].replace("S(1)", "R"))]
    assert [(d.block, d.same_in) for d in diff_blocks(BEFORE, other)] == [
        ("h.0", ("h.1",)),
        ("h.2", ()),
    ]


def test_both_lines_of_a_value_stand_together():
    before = [("a", "a.x: f32[2] = relu(in)"), ("a", "a.y: f32[2] = tanh(a.x)")]
    after = [(path, line.replace("[2]", "[1]")) for path, line in before]
    (diff,) = diff_blocks(before, after)
    assert [line[0] + line[2:5] for line in diff.lines] == ["-a.x", "+a.x", "-a.y", "+a.y"]


def test_nothing_changed_says_so():
    assert render(diff_blocks(BEFORE, BEFORE)) == "no change"
