"""The five worked plans fit the real models, with the numbers their comments state."""

from pathlib import Path

import pytest

from autoshard.dsl.facts_line import facts_line, launch_line
from autoshard.dsl.load import load_file
from autoshard.dsl.resolve import examine
from tests.dsl.goldens import facts_of
from tests.dsl.plans import codes

PLANS = Path(__file__).resolve().parents[2] / "examples/plans"


@pytest.mark.parametrize(
    ("name", "model", "world", "modules", "warnings", "facts"),
    [
        ("gpt2-2cpu", "gpt2", 2, 50, [], "GPT2LMHeadModel 124.4 M; mesh tp 2 = 2"),
        ("bloom-176b-zero3", "bloom", 384, 282, ["AS310"], "1f1b, bubble 25.6 %"),
        ("llama3-70b", "llama3", 256, 562, [], "dp 8 x tp 8 = 256"),
        ("t5-large", "t5", 8, 390, [], "batch 8 x 8 x dp 2 = 128"),
        ("vit-l16", "vit", 8, 0, [], "mesh dp 8 = 8"),
    ],
)
def test_a_worked_plan_fits_its_model(
    name: str, model: str, world: int, modules: int, warnings: list[str], facts: str
) -> None:
    found = examine(load_file(PLANS / f"{name}.plan").require(), facts_of(model), world)
    assert codes(found.diagnostics) == warnings
    assert len(found.resolved.tensor) == modules
    assert facts in facts_line(found.resolved, facts_of(model))
    assert f"{world}" in launch_line(found.resolved) or "--nnodes" in launch_line(found.resolved)


def test_the_interleaved_bubble_is_the_published_formula() -> None:
    resolved = examine(load_file(PLANS / "llama3-70b.plan").require(), None, 256).resolved
    assert "bubble 1.8 %" in facts_line(resolved)  # (4 - 1) / (32 * 5 + 4 - 1)
