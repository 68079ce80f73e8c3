"""P5: fewer micro-batches than stages are no reason to hang, or to refuse."""

from dataclasses import replace

import pytest

from autoshard.schedule import Kind
from tests.bank.equal import assert_equal, finding, toy

PLAN = """
mesh {{ pp = 4 }}
batch {{ micro_batch_size = 1, num_microbatches = {count} }}
pipeline {{ split = even(h.*), schedule = {schedule} }}
"""


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("count", [1, 3])
def test_four_stages_with_few_micro_batches_train_as_one_process_does(
    schedule: str, count: int
) -> None:
    assert_equal(toy(batch=count), PLAN.format(count=count, schedule=schedule), steps=1)


def test_ranks_that_wait_for_a_value_nobody_sends_are_told_at_once() -> None:
    def fault(program) -> bool:
        first, *others = program.schedule.ranks
        sends = [action for action in first if action.kind is Kind.SEND_F]
        rows = (tuple(action for action in first if action != sends[-1]), *others)
        program.schedule = replace(program.schedule, ranks=rows)
        return True

    text = finding(toy(batch=3), PLAN.format(count=3, schedule="1f1b"), fault)
    assert "rank 1" in text
