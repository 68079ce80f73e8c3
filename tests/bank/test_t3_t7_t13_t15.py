"""T3, T7, T13, T15: what tests/ir checks of the captured graph, checked to the end."""

import pytest
import torch

import autoshard
from autoshard.frontend import compile_plan
from autoshard.ir.graph_function import GRAD
from autoshard.testing.models import tiny_hf
from autoshard.testing.mutants import named
from tests.bank.equal import assert_equal, finding, read
from tests.ir.models import DropoutBlock, Nested

ONE = "mesh { tp = 1 }\nbatch { micro_batch_size = 4 }"
NESTED = """
mesh { tp = 2 }
batch { micro_batch_size = 4 }
tensor {
  blocks.[1..2]: colwise(gather)
  towers.* { "0": colwise, "1": rowwise }
  grid.*.0: colwise(gather)
}
"""


def test_an_engine_drops_in_training_and_never_in_evaluation() -> None:
    """Case T3, whatever the mode of the model was when the engine was made."""
    torch.manual_seed(0)
    model, batch = DropoutBlock().train(), {"x": torch.randn(4, 8)}
    engine = autoshard.parallelize(model, f"autoshard 1\n{ONE}\n", example=batch)
    first = engine.evaluate(batch)
    trained = engine.forward_backward(batch)
    assert torch.equal(first, engine.evaluate(batch))
    assert torch.allclose(first, model.eval()(batch["x"]), rtol=1e-6)
    assert not torch.allclose(trained, first, rtol=1e-3)
    assert not torch.equal(trained, engine.forward_backward(batch))


@pytest.mark.parametrize("kind", ["gpt2", "opt", "t5"])
def test_a_tied_weight_is_one_parameter_of_the_joint_graph(kind: str) -> None:
    """Case T7."""
    built = tiny_hf(kind, layers=1, heads=4)
    model, batch, loss = built
    program = compile_plan(model, read(ONE), batch, loss, until="lower-joint").program
    tied = next(spec for spec in program.params if spec.aliases)
    grads = [p.name for p in program.stages[0].joint.outputs if p.kind == GRAD]
    assert grads.count(tied.fqn) == 1 and not set(grads) & set(tied.aliases)
    assert len(grads) == len(list(model.parameters()))
    if kind == "opt":  # case P9 trains the others
        assert_equal(built, ONE)


def test_one_use_of_a_tied_weight_that_does_not_count_would_be_seen() -> None:
    what = finding(tiny_hf("gpt2", layers=1, heads=4), ONE, named("lose-tied-use").plant)
    assert what == "grad transformer.wte.weight"


def test_globs_reach_into_nested_lists_and_dicts_by_their_true_paths() -> None:
    """Case T13."""
    torch.manual_seed(0)
    built = (Nested(), {"x": torch.randn(4, 4)}, None)
    program = compile_plan(built[0], read(NESTED), built[1]).program
    sharded = {spec.fqn for spec in program.params if spec.is_sharded("tp")}
    assert {"blocks.2.weight", "towers.left.1.weight", "grid.1.0.bias"} <= sharded
    assert "blocks.0.weight" not in sharded
    assert_equal(built, NESTED)


@pytest.mark.parametrize("return_dict", [True, False])
def test_a_llama_called_by_keywords_trains_whatever_it_returns(return_dict: bool) -> None:
    """Case T15."""
    model, batch, _ = tiny_hf("llama", layers=1, heads=4)
    batch["return_dict"] = return_dict
    head = "loss" if return_dict else 0
    assert_equal((model, batch, lambda output, batch: output[head]), ONE, plain=False)
