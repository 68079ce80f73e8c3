"""C9: a packed query-key-value weight is split part by part, or refused; never in one piece."""

import pytest
import torch

from autoshard.ir.rewrite import Rewriter
from autoshard.testing.models import tiny_hf
from tests.bank.equal import assert_equal, finding, refusal, toy
from tests.bank.models import FusedToy, rows

SPLIT = torch.ops.aten.split_with_sizes.default
PLAN = """
mesh {{ tp = 2 }}
batch {{ micro_batch_size = {size} }}
tensor {{ {packed}: colwise{parts}, {out}: rowwise }}
"""
MODELS = {
    "nano_gpt": (lambda: toy(), dict(packed="h.*.attn.qkv", out="h.*.attn.proj", size=4)),
    "gpt2": (
        lambda: tiny_hf("gpt2", layers=1, heads=4),
        dict(packed="transformer.h.*.attn.c_attn", out="transformer.h.*.attn.c_proj", size=4),
    ),
    "unknown names": (
        lambda: rows(FusedToy(), 4, 6, 32),
        dict(packed="mix", out="out", size=4),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_three_parts_train_as_one_process_does(name: str) -> None:
    build, names = MODELS[name]
    assert_equal(build(), PLAN.format(parts="(parts=3)", **names))


@pytest.mark.parametrize(
    ("name", "layer"), [("nano_gpt", "h.0.attn.qkv"), ("gpt2", "transformer.h.0.attn.c_attn")]
)
def test_one_piece_is_refused_before_the_model_is_traced(name: str, layer: str) -> None:
    build, names = MODELS[name]
    text = refusal(build(), PLAN.format(parts="", **names))
    assert f"error[AS403]: `{layer}` packs query, key and value in one weight" in text
    assert " --> case.plan:4:10" in text
    assert "= help: `colwise(parts=3)` splits each third" in text


def test_one_piece_under_an_unknown_name_is_refused_at_the_later_split() -> None:
    build, names = MODELS["unknown names"]
    text = refusal(build(), PLAN.format(parts="", **names))
    assert "error[AS403]: `mix` packs several parts in one weight: 32 + 32 + 32 along dim 2" in text
    assert " --> case.plan:4:10" in text
    assert "= help: `colwise(parts=3)` splits each part" in text
    assert "= note: its outputs are taken apart at models.py:" in text
    assert "parts = self.mix(x).split(x.shape[-1], dim=-1)" in text


def test_keys_in_the_place_of_queries_would_be_seen() -> None:
    def fault(program) -> bool:
        function = program.stages[0].phases["F"]
        (split,) = function.graph.find_nodes(op="call_function", target=SPLIT)
        q, k, _ = split.users
        for part, index in ((q, 1), (k, 0)):
            Rewriter(function, "fault").set_args(part, split, index)
        return True

    build, names = MODELS["unknown names"]
    plan = PLAN.format(parts="(parts=3)", **names)
    assert finding(build(), plan, fault) == "loss"
