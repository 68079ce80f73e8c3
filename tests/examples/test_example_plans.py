"""Every plan under examples/ is one the language accepts, without an error or a warning."""

from pathlib import Path

import pytest
import torch

from autoshard.dsl.load import load_file
from autoshard.dsl.resolve import examine
from autoshard.ir.facts import describe
from tests.examples.loading import EXAMPLES

PLANS = sorted(EXAMPLES.rglob("*.plan"))
KINDS = ("gpt/plans/tp2", "gpt/plans/pp2-tp2", "hf/plans/llama-zero3", "bloom/bloom-176b")


def plan_name(path: Path) -> str:
    """Name a test by the plan's place below examples/."""
    return str(path.relative_to(EXAMPLES).with_suffix(""))


@pytest.mark.parametrize("path", PLANS, ids=plan_name)
def test_the_plan_is_read_without_complaint(path: Path) -> None:
    assert [str(diagnostic) for diagnostic in load_file(path).diagnostics] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_plans_that_other_pages_name_exist(kind: str) -> None:
    assert EXAMPLES / f"{kind}.plan" in PLANS


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("gpt/plans/*.plan")), ids=plan_name)
def test_a_gpt_plan_trains_on_the_same_global_batch_as_plain_pytorch(path: Path) -> None:
    assert load_file(path).require().batch.global_batch_size == 16


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("plans/families/*.plan")), ids=plan_name)
def test_a_family_plan_fits_the_model_in_its_default_size(path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    kind = path.read_text(encoding="utf-8").partition("(")[2].partition(" ")[0]
    config = transformers.AutoConfig.for_model(path.stem)
    with torch.device("meta"):
        facts = describe(getattr(transformers, kind).from_config(config))
    examined = examine(load_file(path).require(), facts, 4)
    assert examined.errors == ()
    assert len(examined.resolved.tensor) >= 8  # BLOOM's default has two blocks only


def test_bloom_is_laid_out_as_it_was_trained() -> None:
    plan = load_file(EXAMPLES / "bloom" / "bloom-176b.plan").require()
    assert dict(plan.mesh) == {"pp": 12, "dp": 8, "tp": 4}
    assert (plan.batch.micro_batch_size, plan.batch.num_microbatches) == (2, 128)
    assert plan.zero.stage == 1
