"""The equivalence matrix: every architecture under every layout, in lock step, in float64.

Loss, every gradient, the clip norm and the parameters after two AdamW steps are those of the
captured model on one process with the whole batch. One capture serves all layouts.
"""

from functools import cache

import pytest

from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.capture import capture
from autoshard.ir.promote import promote
from autoshard.mesh import Mesh
from autoshard.source import Source
from autoshard.testing.equivalence import TOLERANCE, compare_compiled, reference_run
from autoshard.testing.models import tiny_gpt, tiny_hf
from autoshard.testing.plans import MATRIX, Layout, plan_text

FAMILIES = ("tiny_gpt", "gpt2", "bloom", "llama")
LAYERS = 4  # as many as the deepest pipeline has stages
MICRO_BATCH = 2


@cache
def built(family: str, samples: int):
    if family == "tiny_gpt":
        return tiny_gpt(layers=LAYERS, batch=samples, length=8)
    return tiny_hf(family, layers=LAYERS, batch=samples, length=8)


@cache
def captured(family: str):
    model, batch, loss = built(family, MICRO_BATCH)
    return promote(capture(model, batch, loss, mesh=Mesh(()), compare=False))


@cache
def reference(family: str, samples: int):
    return reference_run(*built(family, samples))


@pytest.mark.parametrize("layout", MATRIX, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layout_trains_as_one_process_does(family: str, layout: Layout) -> None:
    model, batch, loss = built(family, layout.samples)
    plan = load(Source(f"{layout}.plan", plan_text(family, layout))).require()
    compiled = compile_plan(model, plan, batch, loss, captured=captured(family))
    expected = reference(family, layout.samples)
    comparison = compare_compiled(compiled.program, model, batch, expected)
    wrong = comparison.first_wrong(TOLERANCE)
    assert wrong is None, f"{wrong} (worst: {comparison.worst})"
    assert len(expected[0].grads) == len(list(model.parameters()))
