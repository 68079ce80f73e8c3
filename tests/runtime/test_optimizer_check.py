"""Optimizers that would be silently wrong on shards are refused by name."""

import gc
import warnings

import pytest
import torch

from autoshard.diagnostics import NotExecutableError
from autoshard.runtime.optimizer_check import ELEMENTWISE, OptimizerCheck


def parameter(*shape):
    made = torch.nn.Parameter(torch.ones(*shape))
    made.grad = torch.ones_like(made)
    return made


def test_lbfgs_adafactor_and_muon_are_refused_by_name_at_their_first_step():
    ours = parameter(4, 4)
    check = OptimizerCheck([ours], ranks=2)
    for kind in (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon):
        optimizer = kind([ours])
        with pytest.raises(NotExecutableError, match=f"optimizer '{kind.__name__}' needs whole"):
            optimizer.step(lambda: torch.tensor(0.0))
    assert torch.equal(ours, torch.ones(4, 4))
    check.handle.remove()


def test_a_subclass_of_a_refused_optimizer_is_refused():
    class Mine(torch.optim.Adafactor):
        pass

    ours = parameter(2)
    check = OptimizerCheck([ours], ranks=2)
    with pytest.raises(NotExecutableError, match="'Mine'"):
        Mine([ours]).step()
    check.handle.remove()


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda k: k.__name__)
def test_elementwise_optimizers_pass_and_step_on_empty_shards_too(kind):
    ours, empty = parameter(3), parameter(0)
    check = OptimizerCheck([ours, empty], ranks=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = kind([ours, empty], lr=0.1)
        optimizer.step()
        optimizer.step()
    assert not torch.equal(ours, torch.ones(3))
    check.handle.remove()


def test_an_optimizer_that_nobody_knows_is_warned_of():
    class Lion(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure=None):
            pass

    ours = parameter(2)
    check = OptimizerCheck([ours], ranks=2)
    with pytest.warns(UserWarning, match="'Lion' isn't known to autoshard"):
        Lion([ours]).step()
    check.handle.remove()


def test_one_rank_holds_whole_tensors_so_nothing_is_refused():
    ours = parameter(4, 4)
    OptimizerCheck([ours], ranks=1)
    torch.optim.Adafactor([ours]).step()


def test_optimizers_of_other_models_are_left_alone():
    check = OptimizerCheck([parameter(2)], ranks=2)
    torch.optim.Adafactor([parameter(2)]).step()
    check.handle.remove()


def test_the_check_goes_with_its_engine():
    ours = parameter(2)
    check = OptimizerCheck([ours], ranks=2)
    handle = check.handle
    del check
    gc.collect()
    torch.optim.Adafactor([ours]).step()
    handle.remove()
