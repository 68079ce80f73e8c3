"""Train tiny models on real ranks and leave the losses and the trained model for the test."""

import json
import os
import sys
from pathlib import Path

import torch

import autoshard
from autoshard.testing.models import VOCAB, tiny_gpt, tiny_hf, token_batch
from autoshard.testing.plans import Layout, plan_text
from tests.distributed.launch import say

LENGTH, LAYERS, MAX_NORM = 8, 2, 0.5
KEPT = "llama of two key heads"  # each of them on two ranks of four


def adamw(parameters):
    """Return the optimizer of both sides; its epsilon keeps truly zero gradients from drifting."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6)


def build(family, samples):
    """Return a model with fixed first values, a batch and a loss."""
    torch.manual_seed(7)
    if family == "tiny_gpt":
        return tiny_gpt(layers=LAYERS, batch=samples, length=LENGTH)
    if family == KEPT:
        return tiny_hf("llama", kv_heads=2, layers=LAYERS, batch=samples, length=LENGTH)
    return tiny_hf(family, layers=LAYERS, batch=samples, length=LENGTH)


def plan_of(family, layout):
    """Return the plan that trains a model."""
    if family != KEPT:
        return plan_text(family, layout)
    kept = "q_proj: colwise, self_attn.{k,v}_proj: colwise(replicate=2)"
    return plan_text("llama", layout).replace("{q,k,v}_proj: colwise", kept)


def batches(example, steps, samples):
    """Yield global batches; how many labels are ignored differs from step to step."""
    for step in range(steps):
        made = token_batch(samples, LENGTH, VOCAB, seed=100 + step)
        made["labels"][step % samples, 1:] = -100
        yield {name: made["labels" if name == "labels" else "ids"] for name in example}


def train(family, layout, steps):
    """Return what training by the layout's plan gives, and whether rank 0 sent the program."""
    model, example, loss = build(family, layout.samples)
    plan = plan_of(family, layout)
    share = {name: value.chunk(layout.dp)[0] for name, value in example.items()}
    engine = autoshard.parallelize(model, plan, example=share, loss=loss)
    optimizer = adamw(engine.parameters())
    losses, norms = [], []
    for batch in batches(example, steps, layout.samples):
        local = {n: v.chunk(engine.dp_size)[engine.dp_rank] for n, v in batch.items()}
        losses.append(engine.forward_backward(local).item())
        norms.append(engine.clip_grad_norm_(MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    final = engine.evaluate(local).item()
    is_sent = "from rank 0" in str(engine.report())
    return losses, norms, final, engine.full_state_dict(), is_sent


def main():
    torch.set_num_threads(1)
    out, steps = Path(os.environ["OUT"]), int(sys.argv[1])
    for family, fields in json.loads(sys.argv[2]):
        layout = Layout(**fields)
        losses, norms, final, state, is_sent = train(family, layout, steps)
        name = f"{family} {layout}"
        say(**{name: {"losses": losses, "norms": norms, "final": final}})
        say(**{f"{name} sent": is_sent})
        if state:
            torch.save(state, out / f"{name}.pt")


if __name__ == "__main__":
    main()
