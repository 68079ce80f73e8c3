"""`autoshard.Plan`, the Python twin of plan files."""

import dataclasses
import pickle
from pathlib import Path

import pytest

from autoshard import Plan
from autoshard.diagnostics import PlanError
from autoshard.plan import Call, MeshBlock, Style, ZeroBlock
from autoshard.units import Size

TEXT = """autoshard 1
mesh { pp = 2, dp = auto, tp = 2 }
tensor {
  sequence_parallel = on
  h.* { attn.{q,k}: colwise(parts=3), optional "0.w": rowwise }
  use transformers.tp_plan
  override lm_head: vocab(pad=64)
}
pipeline { split = even(h.*), schedule = gpipe }
zero { stage = 3, units = [h.*, "0.x"], reduce_bucket = 64MB }
recompute { h.*: selective(save=[attention]), budget = 50% }
"""


def twin() -> Plan:
    """Return the same plan from Python values."""
    return Plan(
        mesh={"pp": 2, "dp": "auto", "tp": 2},
        tensor={
            "sequence_parallel": True,
            "h.*": {"attn.{q,k}": "colwise(parts=3)", "optional 0.w": "rowwise"},
            "use": "transformers.tp_plan",
            "override lm_head": Style("vocab", {"pad": 64}),
        },
        pipeline={"split": Call("even", ("h.*",)), "schedule": "gpipe"},
        zero={"stage": 3, "units": ["h.*", "0.x"], "reduce_bucket": Size(64_000_000)},
        recompute={"h.*": "selective(save=[attention])", "budget": "50%"},
    )


def test_the_twin_is_exact() -> None:
    assert twin() == Plan.from_text(TEXT)
    assert Plan.from_text(twin().to_text()) == twin()


def test_a_plan_is_loaded_from_a_file_with_sets(tmp_path: Path) -> None:
    (tmp_path / "x.plan").write_text(TEXT)
    assert Plan.load(tmp_path / "x.plan") == twin()
    assert Plan.load(tmp_path / "x.plan", ["zero.stage=1"]).zero.stage == 1


def test_plans_copy_pickle_and_change_one_block() -> None:
    assert pickle.loads(pickle.dumps(twin())) == twin()
    changed = dataclasses.replace(twin(), zero={"stage": 1})
    assert (changed.zero, changed.mesh) == (ZeroBlock(stage=1), twin().mesh)
    assert changed != twin()
    assert isinstance(Plan(mesh=MeshBlock((("tp", 2),))).mesh, MeshBlock)


def test_the_order_of_the_mesh_counts() -> None:
    assert Plan(mesh={"pp": 2, "tp": 2}) != Plan(mesh={"tp": 2, "pp": 2})


@pytest.mark.parametrize(
    ("blocks", "code", "word"),
    [
        ({"mesh": {"tpp": 2}}, "AS101", "did you mean `tp`"),
        ({"zero": {"stage": 7}}, "AS123", "Plan(...)"),
        ({"tensor": {"x": "colwize"}}, "AS202", "did you mean `colwise`"),
        ({"tensor": {"x": 3}}, "AS002", "unexpected `3`"),
        ({"mesh": "tp=2"}, "AS125", "needs a mapping, not str"),
        ({"zero": {"stage": None}}, "AS125", "can't be None"),
        ({"tensor": {"x": "colwise\n y: z"}}, "AS125", "can't be"),
        ({"tensor": {'a"b': "colwise"}}, "AS125", "can't be a path"),
        ({"tensor": {3: "colwise"}}, "AS125", "can't be a path"),
    ],
)
def test_a_wrong_twin_fails_as_a_wrong_file_would(blocks: dict, code: str, word: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**blocks)
    assert caught.value.code == code
    assert word in str(caught.value)
