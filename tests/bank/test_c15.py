"""C15: a key that all heads share is whole on every rank; its gradient is the sum over them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import Node

from autoshard.frontend import compile_plan
from autoshard.ir.node_info import val
from autoshard.ir.program import Program
from autoshard.ops.collectives import all_gather, all_reduce
from autoshard.testing.models import Built
from tests.bank.equal import assert_equal, double, finding, read
from tests.bank.models import rows
from tests.passes.attention_toys import heads_toy

PLAN = """
mesh { tp = 2 }
batch { micro_batch_size = 2 }
tensor { {q,k,v}_proj: colwise, o: rowwise }
"""


class Gate(nn.Module):
    """Scale each head by one vector that all of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.shared, self.o = nn.Linear(32, 32), nn.Linear(32, 8), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.q_proj(x).unflatten(-1, (4, 8)).transpose(1, 2)
        shared = self.shared(x)[:, None].expand(-1, 4, -1, -1)
        return self.o((heads * shared).transpose(1, 2).flatten(2))


def shared_key() -> Built:
    return heads_toy("separate", 4, 4, shared=True)


def is_sum_of_shared_key(node: Node) -> bool:
    return node.target is all_reduce and val(node).shape[1] == 1


def test_a_key_that_all_heads_share_trains_as_one_process_does() -> None:
    assert_equal(shared_key(), PLAN)


def test_what_all_heads_share_may_be_read_as_it_is_expanded() -> None:
    assert_equal(rows(Gate(), 2, 6, 32), PLAN.replace("{q,k,v}_proj", "q_proj"), steps=1)


def test_a_gradient_of_the_shared_key_that_is_off_would_be_seen() -> None:
    def fault(program: Program) -> bool:
        return double(program, 0, "I", is_sum_of_shared_key)

    assert finding(shared_key(), PLAN, fault).startswith("grad shared")


def test_its_gradient_is_summed_before_it_crosses_not_gathered_from_all_heads() -> None:
    model, batch, loss = shared_key()
    program: Program = compile_plan(model, read(PLAN), batch, loss, until="split-phases").program
    backward = program.stages[0].phases["I"].graph
    assert not backward.find_nodes(op="call_function", target=all_gather)
    (found,) = filter(is_sum_of_shared_key, backward.nodes)
    assert val(found).shape == torch.Size((2, 1, 6, 8))
