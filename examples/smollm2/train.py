"""Fine-tune SmolLM2-135M on Python's language reference: in plain PyTorch, or under a plan.

python examples/smollm2/train.py --plan none
python -m torch.distributed.run --standalone --nproc-per-node 3 \
    examples/smollm2/train.py --plan examples/smollm2/plans/tp3.plan
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from model import build, samples

import autoshard

GLOBAL_BATCH_SIZE = 4
LEARNING_RATE = 5e-5


def train_plain(steps: int, layers: int | None) -> Iterator[float]:
    """Yield the loss of each step of one process that holds the whole model."""
    model, _ = build(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for batch in batches(steps):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def train_parallel(steps: int, layers: int | None, plan: str) -> Iterator[float]:
    """Yield the loss of each step, the same number on every rank."""
    model, example = build(layers)
    engine = autoshard.parallelize(model, plan, example=example)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=LEARNING_RATE)
    for batch in batches(steps, engine.dp_rank, engine.dp_size):
        loss = engine.forward_backward(batch)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def batches(steps: int, dp_rank: int = 0, dp_size: int = 1) -> Iterator[dict[str, torch.Tensor]]:
    """Yield one rank's share of each step; the text begins again once it is read."""
    local = GLOBAL_BATCH_SIZE // dp_size
    for step in range(steps):
        first = step * GLOBAL_BATCH_SIZE + dp_rank * local
        tokens = samples()[torch.arange(first, first + local) % len(samples())]
        yield {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train, print every loss on rank 0 and save them all if asked."""
    parser = argparse.ArgumentParser(description="fine-tune SmolLM2-135M")
    parser.add_argument("--plan", required=True, help="a plan file, or `none` for plain PyTorch")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, help="keep only the first of its 30 layers")
    parser.add_argument("--save", type=Path, help="write the losses of all steps as JSON")
    args = parser.parse_args()

    torch.set_num_threads(1)
    plain = args.plan == "none"
    run = (
        train_plain(args.steps, args.layers)
        if plain
        else train_parallel(args.steps, args.layers, args.plan)
    )
    losses = []
    for step, loss in enumerate(run, 1):
        losses.append(loss)
        if is_first_rank():
            print(f"step {step:3d}  loss {loss:.6f}", flush=True)
    if args.save and is_first_rank():
        args.save.write_text(json.dumps(losses))


def is_first_rank() -> bool:
    """Return whether this process is the one that prints and saves."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


if __name__ == "__main__":
    main()
