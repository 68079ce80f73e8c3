"""C11: a vocabulary that tp doesn't divide is padded for training, and nowhere else."""

import torch

from autoshard.frontend import compile_plan
from autoshard.runtime.control import Control
from autoshard.runtime.state_dict import gather_state, load_state
from autoshard.testing.equivalence import held_values
from autoshard.testing.lockstep import run_ranks
from autoshard.testing.models import Built, tiny_gpt
from autoshard.testing.mutants import named
from tests.bank.equal import assert_equal, finding, read, refusal

PLAN = """
mesh {{ tp = 2 }}
batch {{ micro_batch_size = 4 }}
tensor {{ wte: vocab{pad}, head: vocab{pad} }}
"""
PADDED = PLAN.format(pad="(pad=4)")


def odd() -> Built:
    return tiny_gpt(layers=1, heads=4, vocab=97)


def test_97_words_train_as_one_process_does() -> None:
    found = assert_equal(odd(), PADDED)
    assert found.ours[0].grads["wte.weight"].shape == (97, 32)


def test_without_padding_they_are_refused() -> None:
    text = refusal(odd(), PLAN.format(pad=""))
    assert "error[AS401]: a vocabulary of 97 can't be split over tp = 2" in text
    assert " --> case.plan:4:10" in text
    assert "= help: `vocab(pad=128)` pads it to 256 (checkpoints keep 97)" in text


def test_a_checkpoint_has_97_rows_and_the_plain_model_loads_it(tmp_path) -> None:
    model, batch, loss = odd()
    program = compile_plan(model, read(PADDED), batch, loss).program
    names = tuple(model.state_dict())

    def save(exe) -> dict:
        return gather_state(program, exe.storage, exe.comm, names)

    _, (state, _) = run_ranks(program, held_values(model, program, torch.float32), save)
    torch.save(state, tmp_path / "model.pt")
    loaded, _, _ = tiny_gpt(layers=1, heads=4, vocab=97, seed=1)
    loaded.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert loaded.wte.weight.shape == (97, 32)
    assert torch.equal(loaded(batch["ids"]), model(batch["ids"]))


def test_a_plain_checkpoint_is_loaded_and_saved_as_it_was() -> None:
    model, batch, loss = odd()
    program = compile_plan(model, read(PADDED), batch, loss).program
    state = model.state_dict()

    def load_and_save(exe) -> dict:
        load_state(program, exe.storage, Control(), tuple(state), state)
        return gather_state(program, exe.storage, exe.comm, tuple(state))

    _, (saved, _) = run_ranks(program, {}, load_and_save)
    assert all(torch.equal(saved[name], value) for name, value in state.items())


def test_logits_that_are_not_summed_over_ranks_would_be_seen() -> None:
    assert "ranks 0 and 1 hold different" in finding(odd(), PADDED, named("drop-collective").plant)
