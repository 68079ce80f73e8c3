"""A boundary value that all tensor-parallel ranks hold is sent in parts and gathered."""

from functools import cache

import torch

from autoshard.cost.choices import boundary_choices
from autoshard.frontend import compile_plan
from autoshard.ir.graph_function import BOUNDARY
from autoshard.ops import collectives
from autoshard.proof.static import static_rows
from autoshard.proof.verdict import Status
from autoshard.testing.plans import TENSOR_RULES
from tests.bank.equal import assert_equal, finding, is_call, read, tamper, toy
from tests.bank.models import SkipToy, rows

PLAN = """
mesh {{ pp = {pp}, tp = 2 }}
batch {{ micro_batch_size = 1, num_microbatches = 2 }}
tensor {{ {rules} }}
pipeline {{ split = even(h.*), {options} }}
"""


def plan(scatter: str, pp: int = 2, more: str = "") -> str:
    options = f"scatter_boundary = {scatter}{more}"
    return PLAN.format(pp=pp, rules=TENSOR_RULES["tiny_gpt"], options=options)


@cache
def compiled(scatter: str, pp: int = 2):
    model, batch, loss = toy(batch=2)
    return compile_plan(model, read(plan(scatter, pp)), batch, loss)


def crossing(scatter: str) -> tuple[int, ...]:
    (node,) = compiled(scatter).program.stages[1].phases["F"].named(BOUNDARY).values()
    return tuple(node.meta["val"].shape)


def test_each_rank_sends_its_part_and_the_gradient_comes_back_in_parts() -> None:
    assert crossing("off") == (1, 16, 32) and crossing("on") == (1, 8, 32)
    text = plan("on", more=", schedule = zbv, virtual_stages = 2")
    assert_equal(toy(batch=2, dropout=0.1), text, steps=1, plain=False)


def test_both_ways_are_told_whichever_is_chosen() -> None:
    for scatter in ("on", "off"):
        (row,) = boundary_choices(compiled(scatter).program)
        assert (row.whole_sent, row.part_sent, row.part_gathered) == (2048, 1024, 1024)
        assert row.is_in_parts == (scatter == "on")


def test_auto_leaves_small_values_whole_and_says_so() -> None:
    assert crossing("auto") == (1, 16, 32)
    said = [str(remark) for remark in compiled("auto").remarks]
    assert any("2 KiB sent whole: below 1 MiB" in text for text in said)


def test_types_erasure_and_order_are_proved_with_the_gathers() -> None:
    made = compiled("on")
    rows = static_rows(made.program, made.plain)
    assert [(row.link, row.status) for row in rows] == [
        (link, Status.PROVED) for link in ("types", "erasure", "order")
    ]


def test_a_part_that_skips_a_stage_is_handed_on_as_it_came() -> None:
    torch.manual_seed(0)
    model, batch, loss = rows(SkipToy(), 2)
    text = """
    mesh { pp = 3, tp = 2 }
    batch { micro_batch_size = 1, num_microbatches = 2 }
    tensor { b: colwise(gather) }
    pipeline { split = before(b, c), scatter_boundary = on }
    """
    between = compile_plan(model, read(text), batch, loss).program.stages[1].phases["F"]
    relayed = set(between.named_results(BOUNDARY).values()) & set(between.placeholders)
    assert len(relayed) == 1
    assert_equal((model, batch, loss), text, steps=1)


def test_a_part_that_is_gathered_in_another_order_would_be_seen() -> None:
    def fault(program) -> bool:
        flip = torch.ops.aten.flip.default
        gather = is_call(collectives.all_gather)
        return tamper(program, 1, "F", gather, flip, [1])

    assert finding(toy(batch=2), plan("on"), fault) == "loss"
