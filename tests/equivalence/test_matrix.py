"""The equivalence matrix: every architecture under every layout, in lock step, in float64.

Loss, every gradient, the clip norm and the parameters after two AdamW steps are those of the
captured model on one process with the whole batch.
"""

from functools import cache

import pytest

from autoshard.dsl.load import load
from autoshard.source import Source
from autoshard.testing.equivalence import TOLERANCE, compare_plan
from autoshard.testing.models import tiny_gpt, tiny_hf
from autoshard.testing.plans import MATRIX, Layout, plan_text

FAMILIES = ("tiny_gpt", "gpt2", "bloom", "llama")
LAYERS = 4  # as many as the deepest pipeline has stages


@cache
def built(family: str, samples: int):
    if family == "tiny_gpt":
        return tiny_gpt(layers=LAYERS, batch=samples, length=8)
    return tiny_hf(family, layers=LAYERS, batch=samples, length=8)


@pytest.mark.parametrize("layout", MATRIX, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layout_trains_as_one_process_does(family: str, layout: Layout) -> None:
    model, batch, loss = built(family, layout.samples)
    plan = load(Source(f"{layout}.plan", plan_text(family, layout))).require()
    comparison = compare_plan(model, plan, batch, loss)
    wrong = comparison.first_wrong(TOLERANCE)
    assert wrong is None, f"{wrong} (worst: {comparison.worst})"
    assert len(comparison.reference[0].grads) == len(list(model.parameters()))
