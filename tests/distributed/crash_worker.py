"""Rank 1 fails at its third step while the others are in theirs."""

import os
import time

import torch

from tests.distributed.launch import say
from tests.runtime.toy import Toy
from tests.runtime.toy_engine import toy_engine

torch.set_num_threads(1)
toy = Toy(pp=2)
engine = toy_engine(toy)
for step, (batch,) in enumerate(toy.batches(5)):
    if step == 2 and os.environ["RANK"] == "1":
        say(failed_at=time.time())
        raise ValueError("the disk of rank 1 is full")
    engine.forward_backward(batch)
