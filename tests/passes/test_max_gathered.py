"""`max_gathered`: never is more whole on a rank, by the report and by what ranks hold."""

from functools import cache, partial

import pytest

from autoshard.cost.replay import peaks
from autoshard.diagnostics import PlanError
from autoshard.dsl.load import load
from autoshard.frontend import Compiled, compile_plan
from autoshard.ir.capture import capture
from autoshard.ir.program import Program
from autoshard.mesh import Mesh
from autoshard.source import Source
from autoshard.testing.models import tiny_gpt
from autoshard.units import Size, read_size

MODEL = partial(tiny_gpt, layers=4, width=16, heads=2, vocab=32, length=8, batch=2)
BLOCK = 13120  # bytes of one whole block, the largest unit
EAGER = "prefetch = 3, reshard_after_forward = off"
PLAN = """autoshard 1
mesh {{ pp = {pp}, dp = 2 }}
batch {{ micro_batch_size = 2, num_microbatches = 4 }}
{pipeline}
zero {{ stage = 3, param_persistence_threshold = 0KiB
  {more} }}
"""
PIPELINES = {
    1: "",
    2: "pipeline { split = even(h.*), schedule = interleaved_1f1b, virtual_stages = 2 }",
}


@cache
def captured() -> Program:
    return capture(*MODEL(), mesh=Mesh(()), compare=False)


@cache
def compiled(more: str, pp: int = 1) -> Compiled:
    plan = load(Source("p.plan", PLAN.format(pp=pp, pipeline=PIPELINES[pp], more=more))).require()
    model, batch, loss = MODEL()
    return compile_plan(model, plan, batch, loss, captured=captured())


def gathered(more: str, pp: int = 1) -> int:
    """Return the most that is whole at once on the fullest rank."""
    return max(peak.gathered for peak in peaks(compiled(more, pp).program))


@pytest.mark.parametrize(
    ("pp", "blocks", "reached", "late"),
    [(1, 2, 26240, 6), (1, 3, 39360, 4), (2, 1, 13120, 4), (2, 2, 15680, 0), (2, 5, 41920, 0)],
)
def test_no_rank_gathers_more_at_once(pp: int, blocks: int, reached: int, late: int) -> None:
    limit = blocks * BLOCK
    assert gathered(EAGER, pp) > limit, "nothing to hold back"
    more = f"{EAGER}, max_gathered = {Size(limit)}"
    assert gathered(more, pp) == reached <= limit
    held = [r.message for r in compiled(more, pp).remarks if "`max_gathered = " in r.message]
    assert sum("holds it back" in text for text in held) == late
    assert any("gathered again: with it" in text for text in held)


@pytest.mark.parametrize(
    ("more", "largest"),
    [("prefetch = 2", "`s0.h.0` (12.8 KiB)"), ("reshard_after_forward = step", "`s0.root` (13.3")],
)
def test_too_small_a_limit_names_the_largest_unit_and_the_least(more: str, largest: str) -> None:
    with pytest.raises(PlanError) as caught:
        compiled(f"{more}, max_gathered = 1KiB", 2)
    (found,) = caught.value.diagnostics
    assert found.code == "AS315" and f"needs {largest}" in found.message
    text = found.help[0].partition("= ")[2].partition("`")[0]
    least = read_size(text)
    assert least is not None and gathered(f"{more}, max_gathered = {text}", 2) == least.count
    with pytest.raises(PlanError, match="too small"):
        compiled(f"{more}, max_gathered = {least.count - 1}B", 2)
