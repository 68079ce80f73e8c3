"""One rank compiles for all: what each rank compiles, trains and says, or stops with."""

import os
from contextlib import contextmanager
from unittest import mock

import torch

import autoshard
from autoshard import programs
from autoshard.diagnostics import AutoshardError, PlacementError
from autoshard.ir.save_values import SaveError
from autoshard.runtime import obtain
from autoshard.testing.models import tiny_gpt, token_batch
from tests.distributed.launch import say

RANK = int(os.environ["RANK"])
FOLDER = os.path.join(os.environ["OUT"], "programs")
PLAN = "autoshard 1\nmesh { dp = 2 }\nbatch { micro_batch_size = 2 }\nzero { stage = 1 }\n"
LENGTH = 5


@contextmanager
def on_rank(rank, target, name, replacement):
    """Replace a function on one rank only."""
    if rank != RANK:
        yield
        return
    with mock.patch.object(target, name, replacement):
        yield


def raises(error):
    """Return a function that fails."""

    def fail(*args, **options):
        raise error

    return fail


def run(plan=PLAN, patched=None, evaluates=False, **options):
    """Start an engine, train a step; return compiles, the cache's lines, the numbers."""
    model, _, loss = tiny_gpt(layers=1, batch=2, length=LENGTH, **options)
    model.train()
    if patched is not None:
        model.head.forward = patched
    example = token_batch(2, LENGTH, seed=RANK)
    with mock.patch.object(programs, "compile_plan", wraps=programs.compile_plan) as compiled:
        engine = autoshard.parallelize(model, plan, example=example, loss=loss, cache=FOLDER)
        numbers = [engine.forward_backward(example).item()]
        numbers += [engine.evaluate(example).item()] if evaluates else []
    lines = [x for x in engine.report().lines if x.split()[0] in ("cache", "types", "program")]
    return {"compiles": compiled.call_count, "lines": lines, "numbers": numbers}


def depends(x):
    """Do what capture refuses."""
    return x if x.sum() > 0 else -x


def scaled(x):
    """Compute with a number from outside."""
    return x.repeat_interleave(19, -1) * float(os.environ["SCALE"])


def first_run():
    """Rank 0 compiles for training and for evaluation, the other rank nothing."""
    return run(evaluates=True)


def second_run():
    """Nobody compiles."""
    return run(evaluates=True)


def other_comment_on_one_rank():
    """Keys differ, programs don't: each rank compiles for itself, and training goes on."""
    return run(PLAN + "# mine\n" * RANK)


def no_saved_form():
    """Rank 0 can't send its program."""
    with on_rank(0, obtain, "to_bytes", raises(SaveError("an operator has no saved form"))):
        return run(dropout=0.3)


def other_model_on_one_rank():
    """Rank 1 built another model."""
    return run(dropout=0.1 + 0.1 * RANK)


def refused_model():
    """The model can't be captured."""
    return run(patched=depends)


def refused_by_a_pass():
    """Rank 0 compiles, and is refused with an error of ours."""
    with on_rank(0, programs, "compile_plan", raises(PlacementError("no rule", help="wait"))):
        return run(dropout=0.6)


def hidden_difference():
    """Rank 1 reads a variable that no look at the model shows: another graph."""
    with mock.patch.dict(os.environ, SCALE=str(1 + RANK)):
        return run(patched=scaled)


def refused_on_one_rank():
    """Rank 1's model alone can't be captured."""
    return run(patched=depends if RANK else None)


def compiler_fails_on_rank_0():
    """Rank 0 meets what is no error of ours."""
    with on_rank(0, obtain, "to_bytes", raises(OSError("no space left"))):
        return run(dropout=0.4)


def unreadable_on_rank_1():
    """Rank 1 can't read what it was sent."""
    with on_rank(1, obtain, "from_bytes", raises(SaveError("these bytes are no saved program"))):
        return run()


SCENARIOS = [
    first_run,
    second_run,
    other_comment_on_one_rank,
    no_saved_form,
    other_model_on_one_rank,
    refused_model,
    refused_by_a_pass,
    refused_on_one_rank,
    hidden_difference,
    compiler_fails_on_rank_0,
    unreadable_on_rank_1,
]


def main():
    """Run every scenario."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for scenario in SCENARIOS:
        try:
            said = scenario()
        except (AutoshardError, OSError) as error:
            said = f"{type(error).__name__}: {error}"
        say(**{scenario.__name__: said})


main()
