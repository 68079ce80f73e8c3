"""Train the GPT of model.py: in plain PyTorch, or in parallel with five changed lines.

python examples/gpt/train.py --plan none
python -m torch.distributed.run --standalone --nproc-per-node 4 \
    examples/gpt/train.py --plan examples/gpt/plans/pp2-tp2.plan
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from data import batches
from model import build

import autoshard

GLOBAL_BATCH_SIZE = 16
LEARNING_RATE = 1e-3


def train_plain(steps: int) -> Iterator[float]:
    """Yield the loss of each step of one process that holds the whole model."""
    model, _, loss_fn = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for batch in batches(steps, global_batch_size=GLOBAL_BATCH_SIZE):
        loss = loss_fn(model(batch["tokens"]), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def train_parallel(steps: int, plan: str) -> Iterator[float]:
    """Yield the loss of each step, the same number on every rank."""
    model, example, loss_fn = build()
    engine = autoshard.parallelize(model, plan, example=example, loss=loss_fn)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=LEARNING_RATE)
    for batch in batches(steps, engine.dp_rank, engine.dp_size, GLOBAL_BATCH_SIZE):
        loss = engine.forward_backward(batch)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def main() -> None:
    """Train, print every tenth loss on rank 0 and save them all if asked."""
    parser = argparse.ArgumentParser(description="train a small GPT on real text")
    parser.add_argument("--plan", required=True, help="a plan file, or `none` for plain PyTorch")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save", type=Path, help="write the losses of all steps as JSON")
    args = parser.parse_args()

    torch.set_num_threads(1)
    losses = []
    run = train_plain(args.steps) if args.plan == "none" else train_parallel(args.steps, args.plan)
    for step, loss in enumerate(run, 1):
        losses.append(loss)
        if is_first_rank() and (step == 1 or step % 10 == 0):
            print(f"step {step:3d}  loss {loss:.6f}", flush=True)
    if args.save and is_first_rank():
        args.save.write_text(json.dumps(losses))


def is_first_rank() -> bool:
    """Return whether this process is the one that prints and saves."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


if __name__ == "__main__":
    main()
