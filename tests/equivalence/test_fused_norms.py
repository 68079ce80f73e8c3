"""Training with fused norms is training without them, dropout masks included."""

import pytest
import torch

import autoshard
from autoshard.testing.models import tiny_hf
from autoshard.testing.plans import PIPELINE_UNITS, TENSOR_RULES, Layout, plan_text

TENSOR_RULES |= {
    "bert": """
      bert.encoder.layer.* {
        attention.self.{query,key,value}: colwise, attention.output.dense: rowwise
        intermediate.dense: colwise, output.dense: rowwise
      }
    """
}
PIPELINE_UNITS |= {"bert": "bert.encoder.layer.*"}
LAYOUT = Layout(pp=2, tp=2, microbatches=2)


def train(family: str, fuse: str) -> tuple:
    torch.manual_seed(3)
    model, batch, loss = tiny_hf(family, batch=LAYOUT.samples, length=8, dropout=0.2)
    plan = plan_text(family, LAYOUT, f"fuse {{ add_layer_norm = {fuse} }}")
    return autoshard.lockstep(
        model, plan, [batch, batch], loss=loss, max_norm=1.0, dtype=torch.float64
    )


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama", "bert"])
def test_a_family_trains_to_the_same_numbers_with_and_without_fused_norms(family: str) -> None:
    for fused, plain in zip(train(family, "auto"), train(family, "off"), strict=True):
        torch.testing.assert_close(fused.loss, plain.loss, rtol=1e-12, atol=0)
        largest = max(grad.abs().max() for grad in plain.grads.values())
        for name, grad in plain.grads.items():
            error = (fused.grads[name] - grad).abs().max() / (grad.abs().max() + 1e-6 * largest)
            assert error <= 1e-10, name
