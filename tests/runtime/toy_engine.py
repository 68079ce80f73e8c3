"""An engine of the hand-lowered toy: the real engine with a compiler that knows one model."""

import torch

from autoshard.runtime.engine import Engine, Setup
from autoshard.runtime.start import connect
from tests.runtime.toy import ROWS, Toy

CPU = torch.device("cpu")


def toy_engine(toy, *, plan_text="plan", tensors=None, init=None, compile_toy=None):
    """Return an Engine for ``toy`` on this rank (of torchrun, or the only one)."""

    def compile_for(batch, training):
        return (compile_toy or toy.program)()

    setup = Setup(
        plan_text=plan_text,
        micro_batch_size=ROWS,
        num_microbatches=toy.m,
        compile=compile_for,
        graph=lambda until, stage: toy.program().stages[stage].phases["F"].module(),
        names=tuple(toy.values()),
        init=init,
    )
    example = toy.batches(1)[0][0]
    tensors = toy.values() if tensors is None else tensors
    return Engine(setup, toy.program(), example, tensors, connect(CPU), CPU)


def meta_values():
    return {name: value.to("meta") for name, value in Toy().values().items()}
