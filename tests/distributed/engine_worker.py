"""The engine on real ranks: what each scenario should do, or the message it should stop with."""

import os
import warnings

import torch

from autoshard.diagnostics import AutoshardError
from tests.distributed.launch import say
from tests.runtime.toy import Toy
from tests.runtime.toy_engine import meta_values, toy_engine

RANK = int(os.environ["RANK"])


def other_plan():
    """Rank 1 holds another plan file."""
    toy_engine(Toy(dp=2), plan_text="other" if RANK == 1 else "plan")


def other_program():
    """Rank 0 built another model."""
    toy_engine(Toy(dp=2, zero=1 if RANK == 0 else 0))


def tensor_peers_with_other_batches():
    """A sampler keyed by the global rank feeds tensor parallel peers unlike batches."""
    toy = Toy(tp=2)
    engine = toy_engine(toy)
    engine.forward_backward(toy.batches(1, seed=RANK)[0][0])


def one_rank_with_a_short_batch():
    """Rank 1's loader gives one sample too few."""
    toy = Toy(dp=2, m=2)
    engine = toy_engine(toy)
    batch = toy.batches(1)[0][RANK]
    if RANK == 1:
        batch = {name: value[:3] for name, value in batch.items()}
    engine.forward_backward(batch)


def one_rank_evaluates():
    """Rank 0 evaluates while rank 1 trains."""
    toy = Toy(dp=2)
    engine = toy_engine(toy)
    batch = toy.batches(1)[0][RANK]
    (engine.evaluate if RANK == 0 else engine.forward_backward)(batch)


def one_rank_with_longer_rows():
    """Rank 1's batch has another width."""
    toy = Toy(dp=2)
    engine = toy_engine(toy)
    batch = toy.batches(1)[0][RANK]
    if RANK == 1:
        batch = {**batch, "x": batch["x"].repeat(1, 2)}
    engine.forward_backward(batch)


def adafactor():
    """An optimizer that needs whole tensors."""
    toy = Toy(dp=2, zero=1)
    engine = toy_engine(toy)
    engine.forward_backward(toy.batches(1)[0][RANK])
    torch.optim.Adafactor(engine.parameters()).step()


def a_bad_state_dict_on_rank_0():
    """Rank 0 loads a file with one key too few; the others have none."""
    engine = toy_engine(Toy(pp=2))
    engine.load_full_state_dict({"a.weight": torch.zeros(4, 3)} if RANK == 0 else None)


STOPS = [
    other_plan,
    other_program,
    tensor_peers_with_other_batches,
    one_rank_with_a_short_batch,
    one_rank_evaluates,
    one_rank_with_longer_rows,
    adafactor,
    a_bad_state_dict_on_rank_0,
]


def unlike_models_start_like_rank_0():
    """Every rank built the model with a seed of its own."""
    values = {n: v + RANK for n, v in Toy().values().items()}
    engine = toy_engine(Toy(dp=2, zero=1), tensors=values)
    state = engine.full_state_dict()
    if RANK == 0:
        assert all(torch.equal(state[n], v) for n, v in Toy().values().items())


def init_does_not_depend_on_the_mesh():
    """Random first values on two ranks are equal for every mesh."""
    torch.manual_seed(100 + RANK)  # rank 0's seed counts

    def init(name, tensor):
        tensor.normal_()

    states = []
    for layout in (dict(tp=2), dict(pp=2), dict(dp=2, zero=3)):
        engine = toy_engine(Toy(**layout), tensors=meta_values(), init=init)
        states.append(engine.full_state_dict())
    for name in states[0]:
        assert all(torch.equal(state[name], states[0][name]) for state in states)


def rank_0_alone_loads():
    """A state dict from rank 0 reaches every rank, whatever its storage."""
    for layout in (dict(tp=2), dict(pp=2), dict(dp=2, zero=3)):
        engine = toy_engine(Toy(**layout), tensors=meta_values())
        engine.load_full_state_dict(Toy().values() if RANK == 0 else {})
        state = engine.full_state_dict()
        assert bool(state) == (RANK == 0)
        assert all(torch.equal(v, Toy().values()[n]) for n, v in state.items())


def infinity_on_one_rank_is_seen_by_all():
    """Infinity in one rank's gradient: all ranks see one norm and can skip together."""
    toy = Toy(pp=2)
    engine = toy_engine(toy)
    engine.forward_backward(toy.batches(1)[0][0])
    if RANK == 1:
        next(engine.parameters()).grad[0, 0] = float("inf")
    assert engine.clip_grad_norm_(1.0).isinf()


RUNS = [
    unlike_models_start_like_rank_0,
    init_does_not_depend_on_the_mesh,
    rank_0_alone_loads,
    infinity_on_one_rank_is_seen_by_all,
]


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("error", UserWarning)
    for scenario in STOPS:
        try:
            scenario()
        except AutoshardError as error:
            say(**{scenario.__name__: f"{type(error).__name__}: {error}"})
        else:
            say(**{scenario.__name__: "went on"})
    for scenario in RUNS:
        scenario()
        say(**{scenario.__name__: "ok"})


main()
