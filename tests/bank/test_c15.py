"""C15: a key that all heads share is whole on every rank; its gradient is the sum over them."""

from autoshard.ir.program import Program
from autoshard.ops.collectives import all_gather
from tests.bank.equal import assert_equal, double, finding, is_call
from tests.passes.attention_toys import heads_toy

PLAN = """
mesh { tp = 2 }
batch { micro_batch_size = 2 }
tensor { {q,k,v}_proj: colwise, o: rowwise }
"""


def double_the_shared_key(program: Program) -> bool:
    """Count twice what the heads of all ranks give to the shared key."""
    return double(program, 0, "I", is_call(all_gather))


def test_a_key_that_all_heads_share_trains_as_one_process_does() -> None:
    assert_equal(heads_toy("separate", 4, 4, shared=True), PLAN)


def test_a_gradient_of_the_shared_key_that_is_off_would_be_seen() -> None:
    fault = double_the_shared_key
    assert finding(heads_toy("separate", 4, 4, shared=True), PLAN, fault).startswith("grad shared")
