"""SmolLM2-135M with its trained weights, where its package is installed: under three plans."""

import pytest
import torch

pytest.importorskip("transformers")

from autoshard.dsl.load import load_file
from autoshard.frontend import compile_plan
from autoshard.ir.capture import capture
from autoshard.ir.promote import promote
from autoshard.mesh import Mesh
from autoshard.testing.equivalence import compare_compiled, reference_run
from tests.examples.loading import EXAMPLES, load

smollm2 = load("smollm2/model")
pytestmark = pytest.mark.skipif(
    bool(smollm2.missing()), reason=f"the weights need {', '.join(smollm2.missing())}"
)
LAYERS = 2
SAMPLES = 4


@pytest.fixture(scope="module")
def whole():
    """Return the model with all its layers, and a batch of `SAMPLES` of the text."""
    model, _ = smollm2.build()
    tokens = smollm2.samples()[:SAMPLES]
    return model, {"input_ids": tokens, "labels": tokens}


def test_the_weights_are_trained(whole) -> None:
    model, batch = whole
    with torch.no_grad():
        assert model(**batch).loss.item() < 6  # untrained: log(49152) = 10.8


@pytest.fixture(scope="module")
def sample(whole):
    """Return the first layers, captured (equal to the eager model), and their training."""
    model, batch = whole
    smollm2.keep(model, LAYERS)
    micro = {name: leaf[: smollm2.MICRO_BATCH_SIZE] for name, leaf in batch.items()}
    captured = promote(capture(model, micro, mesh=Mesh(()), compare=True))
    return model, batch, captured, reference_run(model, batch, steps=1)


@pytest.mark.parametrize("name", ["tp3", "pp2", "zero3"])
def test_every_gradient_equals_the_plain_models(sample, name: str) -> None:
    model, batch, captured, reference = sample
    plan = load_file(EXAMPLES / f"smollm2/plans/{name}.plan").require()
    compiled = compile_plan(model, plan, batch, captured=captured)
    found = compare_compiled(compiled.program, model, batch, reference)
    assert found.first_wrong() is None
    assert len(found.ours[0].grads) == len(list(model.parameters()))
