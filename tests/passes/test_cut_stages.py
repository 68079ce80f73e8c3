"""Where stages begin, what crosses between them, and what a wrong cut says."""

import re

import pytest
import torch
from torch import nn

from autoshard.diagnostics import PlanError, VerifyError
from autoshard.ir.graph_function import BATCH, BOUNDARY, PARAM, Port
from autoshard.ir.invariants_pipeline import check_staged
from autoshard.mesh import Mesh
from autoshard.passes._cut_points import Cut, balance
from autoshard.passes.cut_stages import CutStages
from autoshard.plan import Call, PipelineBlock
from tests.passes.programs import before, compile_with, context, even
from tests.passes.toys import WIDTH, FusedNorms, Gpt, PermutedHidden, Skip, token_batch


def cut(model, batch, pipeline, stages: int):
    """Return the cut program; it keeps the invariant."""
    ctx = context(Mesh.of(pp=stages), pipeline=pipeline)
    program = compile_with([CutStages()], model, batch, ctx)
    check_staged(program)
    return program


def modules(program) -> list[list[str]]:
    """Return the modules with parameters of each stage, in order of first use."""
    found = []
    for stage in program.stages:
        names = (name.rsplit(".", 1)[0] for name in stage.forward.named(PARAM))
        found.append(sorted({".".join(name.split(".")[:2]) for name in names}))
    return found


def test_even_deals_units_and_gives_the_remainder_to_earlier_stages() -> None:
    program = cut(Gpt(tied=False), token_batch(), even("emb", "h.*", "head"), 3)
    assert modules(program) == [["emb", "h.0"], ["h.1", "h.2", "ln_f"], ["head"]]


def test_before_names_the_first_module_of_each_later_stage() -> None:
    program = cut(Gpt(tied=False), token_batch(), before("h.2", "h.1"), 3)
    assert modules(program) == [["emb", "h.0"], ["h.1"], ["h.2", "head", "ln_f"]]


def test_auto_puts_cuts_between_blocks() -> None:
    program = cut(Gpt(tied=False, blocks=4), token_batch(), PipelineBlock(), 2)
    assert modules(program)[0] == ["emb", "h.0", "h.1"]


def test_balance_makes_the_heaviest_stage_lightest_then_the_rest_even() -> None:
    cuts = [Cut(i, str(i)) for i in range(1, 6)]
    assert [c.path for c in balance(cuts, [1, 1, 1, 9, 1, 1], 3)] == ["3", "4"]
    assert [c.path for c in balance(cuts, [4, 4, 4, 4, 4, 4], 3)] == ["2", "4"]


def test_one_stage_is_not_cut() -> None:
    program = cut(Gpt(), token_batch(), PipelineBlock(), 1)
    assert len(program.stages) == 1
    assert not program.stages[0].forward.named(BOUNDARY)


def test_only_the_hidden_state_crosses_not_masks_or_rotary_tables() -> None:
    model = Gpt(masked=True, rotary=True, tied=False)
    program = cut(model, token_batch(), before("h.1"), 2)
    assert program.stages[0].forward.outputs == (Port(BOUNDARY, "h.0"),)
    assert Port(BATCH, "0") in program.stages[1].forward.inputs
    assert program.params["angles"].homes == (0, 1)


def test_a_tied_weight_has_two_homes() -> None:
    program = cut(Gpt(), token_batch(), before("h.1"), 2)
    assert program.params["head.weight"].homes == (0, 1)
    assert program.params["h.2.up.weight"].homes == (1,)


def test_a_value_that_skips_a_stage_is_relayed_once_per_hop() -> None:
    batch = (torch.randn(2, WIDTH), torch.randn(2, WIDTH))
    program = cut(Skip(), batch, before("b", "c"), 3)
    relayed = Port(BOUNDARY, "root")
    assert relayed in program.stages[0].forward.outputs
    assert relayed in program.stages[1].forward.inputs
    assert relayed in program.stages[1].forward.outputs
    assert relayed in program.stages[2].forward.inputs


def test_what_crosses_is_contiguous_on_both_sides() -> None:
    batch = (torch.randn(2, WIDTH, 3), torch.randn(2, WIDTH, 3))
    program = cut(PermutedHidden(), batch, before("b"), 2)
    sent = program.stages[0].forward.results[0].meta["val"]
    read = program.stages[1].forward.node(BOUNDARY, "root").meta["val"]
    assert sent.is_contiguous() and read.is_contiguous()


@pytest.mark.parametrize(
    ("pipeline", "stages", "text"),
    [
        (before("h.9"), 2, "no module `h.9` computes anything"),
        (before("h.1"), 3, "1 cut makes 2 stages, but the plan has 3"),
        (before("h.1", "h.1.ln"), 3, "begin with the same operation"),
        (even("g.*"), 2, "`g.*` names no module"),
        (even("h.*"), 4, "3 units can't fill 4 stages"),
        (PipelineBlock(split=Call("auto", (), {"by": "flops"})), 60, "too few for 60 stages"),
    ],
)
def test_a_wrong_cut_says_what_is_wrong(pipeline, stages: int, text: str) -> None:
    with pytest.raises(PlanError, match=re.escape(text)):
        cut(Gpt(), token_batch(), pipeline, stages)


class Table(nn.Module):
    """A large table that costs no flops to read, and three small layers that do."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(400, WIDTH)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids, target):
        return (self.c(self.b(self.a(self.emb(ids)))) * target).sum()


@pytest.mark.parametrize(("by", "first"), [("flops", ["a", "emb"]), ("params", ["emb"])])
def test_auto_weighs_flops_or_parameters(by: str, first: list[str]) -> None:
    batch = (torch.zeros(2, dtype=torch.long), torch.randn(2, WIDTH))
    split = PipelineBlock(split=Call("auto", (), {"by": by}))
    program = cut(Table(), batch, split, 2)
    assert modules(program)[0] == first


def test_check_staged_sees_a_value_that_nobody_sends() -> None:
    program = cut(Gpt(), token_batch(), before("h.1"), 2)
    first = program.stages[0].forward
    first.set_outputs((), ())
    with pytest.raises(VerifyError, match=r"stage 1 reads `h\.0`, which stage 0 doesn't send"):
        check_staged(program)


def test_check_staged_sees_a_wrong_home() -> None:
    program = cut(Gpt(), token_batch(), before("h.1"), 2)
    program.params.update("emb.weight", homes=(0,))
    says = r"used by stages \[0, 1\] but its homes are \[0\]: %\w+ in emb \(toys"
    with pytest.raises(VerifyError, match=says):
        check_staged(program)


@pytest.mark.parametrize("rms", (False, True))
def test_of_a_fused_add_and_norm_at_a_border_only_the_sum_crosses(rms: bool) -> None:
    batch = (torch.randn(2, WIDTH), torch.randn(2, WIDTH))
    program = cut(FusedNorms(rms), batch, before("norm_b", "norm_c"), 3)
    first, second, third = (stage.forward for stage in program.stages)
    assert len(first.outputs) == len(second.outputs) == 1
    targets = {node.target for node in (*second.graph.nodes, *third.graph.nodes)}
    ours = torch.ops.autoshard
    assert not targets & {ours.add_layer_norm.default, ours.add_rms_norm.default}
