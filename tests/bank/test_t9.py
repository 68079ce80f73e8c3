"""T9: integers and truth values may be needed, or made, on both sides of a stage boundary."""

import pytest
import torch

from autoshard.frontend import compile_plan
from autoshard.ir.graph_function import BATCH, BOUNDARY, TANGENT
from autoshard.proof.static import static_rows
from autoshard.proof.verdict import Status
from autoshard.testing.models import Built, tiny_hf
from autoshard.testing.plans import TENSOR_RULES
from tests.bank.equal import assert_equal, finding, read, tamper
from tests.bank.models import Router, rows

aten = torch.ops.aten
GPT2 = """
mesh { pp = 2 }
batch { micro_batch_size = 2, num_microbatches = 4 }
pipeline { split = before(transformer.h.2) }
"""
TENSOR = f"""
mesh {{ tp = 4 }}
batch {{ micro_batch_size = 4, num_microbatches = 2 }}
tensor {{ {TENSOR_RULES["gpt2"]} }}
recompute {{ transformer.h.*: full }}
"""
DATA = f"""
mesh {{ dp = 2, tp = 2 }}
batch {{ micro_batch_size = SIZE, num_microbatches = COUNT }}
tensor {{ {TENSOR_RULES["gpt2"]} }}
"""
ROUTER = """
mesh { pp = 2 }
batch { micro_batch_size = 1, num_microbatches = 4 }
pipeline { split = before(bias) }
"""


def masked_gpt2(layers: int = 4) -> Built:
    """Return GPT-2 on samples of different lengths, padded on the left."""
    model, batch, loss = tiny_hf("gpt2", layers=layers, heads=4, batch=8)
    lengths = torch.tensor([16, 9, 12, 5, 16, 7, 3, 14])
    mask = torch.arange(16) >= 16 - lengths[:, None]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    batch |= {"attention_mask": mask, "position_ids": positions}
    batch["labels"] = batch["labels"].masked_fill(~mask, -100)
    return model, batch, loss


@pytest.mark.parametrize(("size", "count"), [(2, 2), (1, 4)])
def test_the_look_up_of_a_mask_by_counted_samples_is_proved_over_dp(size: int, count: int) -> None:
    built = masked_gpt2(layers=1)
    model, batch, loss = built
    text = DATA.replace("SIZE", str(size)).replace("COUNT", str(count))
    share = {name: value[: size * count] for name, value in batch.items()}
    compiled = compile_plan(model, read(text), share, loss)
    rows = static_rows(compiled.program, compiled.plain)
    assert [str(row) for row in rows if row.status is not Status.PROVED] == []
    assert_equal(built, text, steps=1)


def test_a_truth_mask_and_positions_are_fed_to_the_stages_that_read_them() -> None:
    built = masked_gpt2()
    assert_equal(built, GPT2)
    program = compile_plan(*built[:1], read(GPT2), *built[1:]).program
    first, last = (stage.phases["F"] for stage in program.stages)
    assert {"attention_mask", "position_ids"} <= set(first.named(BATCH))
    assert "attention_mask" in last.named(BATCH)
    crossing = last.named(BOUNDARY).values()
    assert all(node.meta["val"].dtype.is_floating_point for node in crossing)


def test_a_truth_mask_meets_one_head_a_rank_and_is_read_again_in_recomputation() -> None:
    assert_equal(masked_gpt2(layers=1), TENSOR, steps=1)


def test_a_mask_that_is_lost_in_the_second_stage_would_be_seen() -> None:
    def fault(program) -> bool:
        mask = program.stages[1].phases["F"].node(BATCH, "attention_mask")
        return tamper(program, 1, "F", lambda node: node is mask, aten.logical_not.default)

    assert finding(masked_gpt2(), GPT2, fault) == "loss"


def test_an_integer_that_a_stage_computes_crosses_without_a_gradient() -> None:
    built = rows(Router())
    assert_equal(built, ROUTER)
    program = compile_plan(*built[:1], read(ROUTER), *built[1:]).program
    crossing = program.stages[1].phases["F"].named(BOUNDARY)
    dtypes = {name: node.meta["val"].dtype for name, node in crossing.items()}
    assert {torch.int64, torch.bool} <= set(dtypes.values())
    floats = {name for name, dtype in dtypes.items() if dtype.is_floating_point}
    assert set(program.stages[1].phases["I"].named_results(TANGENT)) == floats
