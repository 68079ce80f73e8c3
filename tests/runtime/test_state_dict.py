"""State dicts: whole again on rank 0, and strict on the way in."""

import pytest
import torch

from autoshard.diagnostics import CheckpointError
from autoshard.ir.params import ParamSpec, ParamTable
from autoshard.runtime.control import Control
from autoshard.runtime.state_dict import check_state, gather_state, load_state
from autoshard.testing.lockstep import run_ranks
from tests.runtime.toy import Toy

LAYOUTS = [dict(), dict(tp=2, pp=2), dict(dp=3, zero=1), dict(dp=2, pp=2, tp=2, zero=3)]
TABLE = ParamTable(
    (
        ParamSpec(
            "embed.weight", (97, 4), torch.float32, aliases=("head.weight",), padded=(100, 4)
        ),
        ParamSpec("layer.weight", (4, 4), torch.float32),
        ParamSpec("layer.bias", (4,), torch.float32),
    )
)
NAMES = ("embed.weight", "layer.weight", "layer.bias", "head.weight")


def state():
    embed = torch.randn(97, 4)
    return {
        "embed.weight": embed,
        "layer.weight": torch.randn(4, 4),
        "layer.bias": torch.randn(4),
        "head.weight": embed,
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rank_0_gets_the_whole_model_and_the_others_nothing(layout):
    toy = Toy(**layout)
    program, names = toy.program(), tuple(toy.values())

    def body(exe):
        return gather_state(program, exe.storage, exe.comm, names)

    _, (first, *others) = run_ranks(program, toy.values(), body)
    assert list(first) == list(names)
    for name, value in toy.values().items():
        assert torch.equal(first[name], value)
    assert not any(others)


def test_all_that_is_wrong_is_listed_at_once_and_nothing_is_loaded():
    bad = state()
    bad["layer.weights"] = bad.pop("layer.weight")  # renamed
    bad["layer.bias"] = torch.zeros(5)  # one shape off
    bad["extra"] = torch.zeros(2)  # one key more
    del bad["head.weight"]  # one key less
    with pytest.raises(CheckpointError) as caught:
        check_state(TABLE, NAMES, bad)
    text = str(caught.value)
    assert "2 missing, 2 unexpected; nothing was loaded" in text
    for line in (
        "missing: 'layer.weight' [4, 4]",
        "missing: 'head.weight' [97, 4]",
        "unexpected: 'layer.weights' [4, 4]",
        "unexpected: 'extra' [2]",
        "renamed? 'layer.weights' has the shape of 'layer.weight'",
        "shape: 'layer.bias' is [5] in the state dict, [4] in the model",
    ):
        assert line in text


def test_a_state_dict_that_does_not_fit_leaves_the_storage_alone():
    toy = Toy()
    program, names = toy.program(), tuple(toy.values())
    bad = {"a.weight": torch.zeros(4, 3).double(), "b.weight": torch.zeros(5, 5)}

    def body(exe):
        with pytest.raises(CheckpointError):
            load_state(program, exe.storage, Control(), names, bad)
        return gather_state(program, exe.storage, exe.comm, names)

    _, (after,) = run_ranks(program, toy.values(), body)
    assert torch.equal(after["a.weight"], toy.values()["a.weight"])


def test_tied_names_with_different_values_are_refused():
    bad = state()
    bad["head.weight"] = bad["head.weight"] + 1
    with pytest.raises(CheckpointError, match=r"'head\.weight' and 'embed\.weight' are one param"):
        check_state(TABLE, NAMES, bad)


def test_a_fitting_state_dict_is_accepted():
    check_state(TABLE, NAMES, state())
