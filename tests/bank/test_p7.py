"""P7: a value that skips a stage is handed on by the stage between."""

import pytest
import torch

from autoshard.diagnostics import RuntimeMismatchError
from autoshard.frontend import compile_plan
from autoshard.ir.graph_function import BOUNDARY, TANGENT
from autoshard.runtime.messages import Messages
from tests.bank.equal import assert_equal, double, finding, read
from tests.bank.models import SkipToy, rows

PLAN = """
mesh { pp = 3 }
batch { micro_batch_size = 1, num_microbatches = 4 }
pipeline { split = before(b, c) }
"""


def skip_toy():
    torch.manual_seed(0)
    return rows(SkipToy())


def test_a_skip_connection_over_a_stage_trains_as_one_process_does() -> None:
    assert_equal(skip_toy(), PLAN)


def test_the_stage_between_hands_on_the_value_and_its_gradient() -> None:
    model, batch, loss = skip_toy()
    stages = compile_plan(model, read(PLAN), batch, loss).program.stages
    (early,) = stages[1].phases["F"].named(BOUNDARY)
    relayed = stages[1].phases["F"].named_results(BOUNDARY)
    assert early in relayed and set(relayed) == set(stages[2].phases["F"].named(BOUNDARY))
    assert early in stages[2].phases["I"].named_results(TANGENT)
    assert early in stages[1].phases["I"].named(TANGENT)


def test_a_gradient_that_is_not_handed_on_would_be_seen() -> None:
    def fault(program) -> bool:
        (early,) = program.stages[1].phases["F"].named(BOUNDARY)
        arriving = program.stages[1].phases["I"].node(TANGENT, early)
        return double(program, 1, "I", lambda node: node is arriving)

    assert finding(skip_toy(), PLAN, fault) == "grad a.weight"


def test_a_value_handed_on_from_the_buffer_it_came_in_would_be_seen(monkeypatch) -> None:
    monkeypatch.setattr(Messages, "in_buffers", lambda self, results: ())
    with pytest.raises(RuntimeMismatchError, match="rank 1 changed what it sends to rank 2"):
        assert_equal(skip_toy(), PLAN)
