"""T11: one buffer that every block reads is copied to each stage and saved once."""

import torch

from autoshard.frontend import compile_plan
from autoshard.ir.graph_function import BOUNDARY, BUFFER
from autoshard.runtime.state_dict import gather_state
from autoshard.testing.equivalence import held_values
from autoshard.testing.lockstep import run_ranks
from tests.bank.equal import assert_equal, double, finding, read
from tests.bank.models import rotary_toy

PLAN = """
mesh { pp = 2 }
batch { micro_batch_size = 2, num_microbatches = 2 }
pipeline { split = even(blocks.*) }
"""


def test_a_table_of_all_blocks_is_no_obstacle() -> None:
    assert_equal(rotary_toy(table=True), PLAN)


def test_both_stages_hold_the_buffer_and_none_sends_it() -> None:
    model, batch, loss = rotary_toy(table=True)
    program = compile_plan(model, read(PLAN), batch, loss).program
    assert program.params["table"].homes == (0, 1)
    for stage in program.stages:
        assert list(stage.phases["F"].named(BUFFER)) == ["table"]
    crossing = program.stages[1].phases["F"].named(BOUNDARY).values()
    assert {tuple(node.meta["val"].shape) for node in crossing} == {(2, 16, 32)}


def test_the_state_dict_has_it_once_and_as_it_was() -> None:
    model, batch, loss = rotary_toy(table=True)
    program = compile_plan(model, read(PLAN), batch, loss).program
    names = tuple(model.state_dict())

    def save(exe) -> dict:
        return gather_state(program, exe.storage, exe.comm, names)

    _, (state, _) = run_ranks(program, held_values(model, program, torch.float32), save)
    assert list(state) == list(names) and names.count("table") == 1
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_a_stage_with_another_table_would_be_seen() -> None:
    def fault(program) -> bool:
        table = program.stages[1].phases["F"].node(BUFFER, "table")
        return double(program, 1, "F", lambda node: node is table)

    assert finding(rotary_toy(table=True), PLAN, fault) == "loss"
