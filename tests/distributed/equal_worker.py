"""Train by each plan on real ranks; leave losses, norms and parameters for an exact comparison."""

import json
import os
import sys
from pathlib import Path

import torch

import autoshard
from autoshard.testing.lockstep import adamw
from autoshard.testing.models import tiny_gpt, token_batch
from tests.distributed.launch import say

LENGTH, SAMPLES, STEPS, MAX_NORM = 8, 8, 3, 0.5


def build():
    """Return the model with fixed first values, and its loss."""
    model, _, loss = tiny_gpt(layers=2, batch=SAMPLES, length=LENGTH, seed=7)
    return model, loss


def batches():
    """Return global batches; ranks have different numbers of labels that count."""
    made = [token_batch(SAMPLES, LENGTH, seed=100 + step) for step in range(STEPS)]
    for step, batch in enumerate(made):
        batch["labels"][step, 1:] = -100
    return made


def share(batch, index, size):
    """Return the part of a data parallel rank."""
    return {name: value.chunk(size)[index] for name, value in batch.items()}


def main():
    torch.set_num_threads(1)
    out = Path(os.environ["OUT"])
    for name, (plan, max_norm) in json.loads(sys.argv[1]).items():
        model, loss = build()
        size = int(os.environ["WORLD_SIZE"])
        example = share(batches()[0], 0, size)
        engine = autoshard.parallelize(model, plan, example=example, loss=loss, verify=False)
        optimizer = adamw(engine.parameters())
        losses, norms = [], []
        for batch in batches():
            local = share(batch, engine.dp_rank, size)
            losses.append(engine.forward_backward(local).item())
            if max_norm:
                norms.append(engine.clip_grad_norm_(max_norm).item())
            optimizer.step()
            optimizer.zero_grad()
        overflows = engine.stats().get("overflows", 0)
        say(**{name: {"losses": losses, "norms": norms, "overflows": overflows}})
        state = engine.full_state_dict()
        if state:
            torch.save(state, out / f"{name}.pt")


if __name__ == "__main__":
    main()
