"""Train a small Hugging Face model: in plain PyTorch, or in parallel with five changed lines.

python examples/hf/train.py --model llama --plan none
python -m torch.distributed.run --standalone --nproc-per-node 4 \
    examples/hf/train.py --model llama --plan examples/hf/plans/llama-pp2-tp2.plan
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from models import BUILDERS, CONTEXT

import autoshard

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpt"))
from data import batches

GLOBAL_BATCH_SIZE = 16
LEARNING_RATE = 1e-3


def train_plain(name: str, steps: int) -> Iterator[float]:
    """Yield the loss of each step of one process that holds the whole model."""
    model, _ = BUILDERS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for batch in text(steps):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def train_parallel(name: str, steps: int, plan: str) -> Iterator[float]:
    """Yield the loss of each step, the same number on every rank."""
    model, example = BUILDERS[name]()
    engine = autoshard.parallelize(model, plan, example=example)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=LEARNING_RATE)
    for batch in text(steps, engine.dp_rank, engine.dp_size):
        loss = engine.forward_backward(batch)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def text(steps: int, dp_rank: int = 0, dp_size: int = 1) -> Iterator[dict[str, torch.Tensor]]:
    """Yield one rank's share of each step; the models shift the labels themselves."""
    for batch in batches(steps, dp_rank, dp_size, GLOBAL_BATCH_SIZE, CONTEXT):
        yield {"input_ids": batch["tokens"], "labels": batch["tokens"]}


def main() -> None:
    """Train, print every tenth loss on rank 0 and save them all if asked."""
    parser = argparse.ArgumentParser(description="train a small Hugging Face model on real text")
    parser.add_argument("--model", choices=BUILDERS, required=True)
    parser.add_argument("--plan", required=True, help="a plan file, or `none` for plain PyTorch")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save", type=Path, help="write the losses of all steps as JSON")
    args = parser.parse_args()

    torch.set_num_threads(1)
    plain = args.plan == "none"
    run = (
        train_plain(args.model, args.steps)
        if plain
        else train_parallel(args.model, args.steps, args.plan)
    )
    losses = []
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
