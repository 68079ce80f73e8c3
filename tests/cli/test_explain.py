"""`autoshard explain`: pages of error codes, and the life of a name through the passes."""

import pytest

from autoshard.cli import main
from autoshard.diagnostics import AutoshardError
from autoshard.dsl.load import load
from autoshard.frontend import compile_plan
from autoshard.ir.life import Life
from autoshard.source import Source
from autoshard.testing.models import tiny_gpt

PLAN = """autoshard 1
mesh { pp = 2, dp = 2, tp = 2 }
batch { micro_batch_size = 2, num_microbatches = 2 }
tensor {
  wte: vocab
  head: vocab
  h.*.mlp.up: colwise
  h.*.mlp.down: rowwise
}
pipeline { schedule = 1f1b }
zero { stage = 3, param_persistence_threshold = 0B }
"""


def lives(*names: str) -> list[Life]:
    """Return what became of the names in one compilation; each step is told twice."""
    found, (model, batch, loss) = [Life(name) for name in names], tiny_gpt()
    compile_plan(
        model,
        load(Source("gpt.plan", PLAN)).require(),
        batch,
        loss,
        observe=lambda step, program: [life.watch(step.name, program) for life in found * 2],
    )
    return found


def test_explain_prints_the_page_of_a_code(capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", "as304"]) == 0
    assert capsys.readouterr().out.startswith("AS304: the batch doesn't add up\n")
    assert main(["explain"]) == 0
    assert "AS001  " in capsys.readouterr().out


def test_a_name_without_a_plan_says_what_to_add(capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", "h.0.mlp.up"]) == 1
    assert (
        "autoshard explain h.0.mlp.up --plan PLAN --model file.py:function"
        in capsys.readouterr().err
    )


def test_a_name_is_followed_through_the_passes() -> None:
    weight, module, tied, nothing = lives(
        "h.0.mlp.up.weight", "h.0.mlp.up", "head.weight", "h.0.mlp.upp"
    )
    assert len({chapter.step for chapter in weight.chapters}) == len(weight.chapters)
    steps = {chapter.step: dict(chapter.lines) for chapter in weight.chapters}
    assert "S(0)@tp: " in steps["shard-params"]["parameter"]
    assert ", stage 0" in steps["cut-stages"]["parameter"]
    assert "1/2 of that on each rank of dp" in steps["shard-storage"]["parameter"]
    assert "stage0.I" in steps["split-phases"]
    assert "plan:7" in steps["propagate-placements"]["forward"]
    assert "joint  return grad:h.0.mlp.up.weight" in weight.text().replace("stage0.", "")
    assert "h.0.mlp.up.copy_to" in module.text()
    assert "one tensor with " in tied.text()
    assert "stage 0, 1" in tied.text()
    with pytest.raises(AutoshardError, match=r"h\.0\.mlp\.upp") as caught:
        nothing.text()
    assert "did you mean `h.0.mlp.up`" in str(caught.value.diagnostics[0].help)
