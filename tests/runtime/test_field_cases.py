"""Failures that other systems had, replayed: accumulation, few micro-batches, norms, counts."""

import pytest
import torch

import autoshard
from autoshard.testing.models import tiny_gpt, tiny_hf, token_batch
from autoshard.testing.plans import Layout, plan_text

LENGTH = 8


def run(layout, batches, *, layers=2, max_norm=0.5):
    """Train in lock step, in float64, one step a batch."""
    torch.manual_seed(3)
    model, _, loss = tiny_gpt(layers=layers, batch=layout.samples, length=LENGTH)
    plan = plan_text("tiny_gpt", layout)
    return autoshard.lockstep(
        model, plan, batches, loss=loss, max_norm=max_norm, dtype=torch.float64
    )


def same(ours, theirs, tolerance=1e-10):
    """Tell whether two runs computed the same: losses, norms, every gradient and parameter."""
    for a, b in zip(ours, theirs, strict=True):
        floor = 1e-6 * max(v.abs().max() for v in b.grads.values())
        assert (a.loss - b.loss).abs() <= tolerance * b.loss.abs()
        assert (a.norm - b.norm).abs() <= tolerance * b.norm
        for name, grad in b.grads.items():
            assert (a.grads[name] - grad).abs().max() <= tolerance * (grad.abs().max() + floor)
            assert torch.allclose(a.params[name], b.params[name], rtol=1e-9, atol=1e-11)
    return True


def uneven_batch(samples=4):
    """Return a batch whose samples have 1, 6, 3 and 8 labels that count."""
    batch = token_batch(samples, LENGTH)
    batch["labels"] = torch.arange(LENGTH).expand(samples, LENGTH).clone()
    for row, count in enumerate([1, 6, 3, 8][:samples]):
        batch["labels"][row, count:] = -100
    return batch


def test_micro_batches_with_unequal_token_counts_give_the_gradients_of_one_batch():
    batch = uneven_batch()
    one = run(Layout(micro_batch_size=4), [batch])
    assert same(run(Layout(micro_batch_size=1, microbatches=4), [batch]), one)
    assert same(run(Layout(dp=2, micro_batch_size=1, microbatches=2), [batch]), one)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_fewer_micro_batches_than_stages_run_and_are_right(schedule, microbatches):
    batch = token_batch(microbatches, LENGTH)
    plain = Layout(micro_batch_size=microbatches)
    deep = Layout(pp=4, schedule=schedule, micro_batch_size=1, microbatches=microbatches)
    assert same(run(deep, [batch], layers=4), run(plain, [batch], layers=4))


def test_no_label_that_counts_gives_nan_as_in_torch():
    batch = token_batch(2, LENGTH)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    (record,) = run(Layout(dp=2, micro_batch_size=1), [batch])
    assert record.loss.isnan()


def test_dropout_drops_the_same_elements_under_every_mesh():
    def run_with_dropout(layout):
        torch.manual_seed(3)
        model, batch, loss = tiny_hf("gpt2", layers=1, batch=4, length=LENGTH, dropout=0.3)
        plan = plan_text("gpt2", layout)
        return autoshard.lockstep(
            model, plan, [batch, batch], loss=loss, max_norm=1.0, dtype=torch.float64
        )

    one = run_with_dropout(Layout(micro_batch_size=4))
    assert one[0].loss != one[1].loss
    split = Layout(dp=2, tp=2, zero=3, micro_batch_size=1, microbatches=2)
    assert same(run_with_dropout(split), one)
