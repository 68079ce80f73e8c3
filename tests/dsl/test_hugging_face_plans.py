"""Every tp and ep plan that transformers ships is a valid `tensor` block, verbatim."""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from autoshard.diagnostics import Severity
from autoshard.dsl.draft import draft
from autoshard.dsl.foreign import HF_REFUSED, HF_STYLES
from autoshard.dsl.load import load
from autoshard.dsl.resolve import examine
from autoshard.ir.facts import describe
from autoshard.model_facts import ModelFacts, ModuleFacts, ParamFacts
from autoshard.source import Source
from autoshard.testing.coverage.families import Family, build
from autoshard.testing.equivalence import compare_plan

NAMES = ("base_model_tp_plan", "base_model_ep_plan", "_tp_plan", "_ep_plan")


def shipped() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield the source text and the value of every plan in transformers' model folders."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("transformers isn't installed")
    for path in sorted((Path(spec.origin).parent / "models").glob("*/*.py")):
        text = path.read_text(encoding="utf-8")
        if any(name in text for name in NAMES):
            yield from _plans_in(path.stem, text)


def _plans_in(name: str, text: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    for node in ast.walk(ast.parse(text)):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        named = any(isinstance(t, ast.Name) and t.id in NAMES for t in targets)
        if named and isinstance(getattr(node, "value", None), ast.Dict):
            try:
                value = ast.literal_eval(node.value)
            except ValueError:  # built from other dictionaries: nothing to paste
                continue
            yield name, ast.get_source_segment(text, node.value), value


def test_all_of_them_paste_as_they_are() -> None:
    plans = [plan for plan in shipped() if plan[2]]
    assert len(plans) > 200
    refused: Counter[str] = Counter()
    for name, text, value in plans:
        loaded = load(Source(name, f"autoshard 1\ntensor {text}\n"))
        wrong = [d for d in loaded.errors if d.code != "AS212"]
        assert wrong == [], name
        refused.update(d.span.text for d in loaded.errors)
        read = {rule.glob: rule.style.name for rule in loaded.plan.tensor.rules}
        assert list(read) == list(value)
        assert all(read[p] == HF_STYLES[s][0] for p, s in value.items() if s in HF_STYLES), name
    assert {word.strip('"') for word in refused} <= set(HF_REFUSED)


def test_every_style_that_transformers_knows_is_read_or_refused_by_name() -> None:
    parallel = pytest.importorskip("transformers.integrations.tensor_parallel")
    known = set(parallel.ALL_PARALLEL_STYLES.keys())
    assert known - set(HF_STYLES) - set(HF_REFUSED) == set()


FAMILIES = ("llama", "qwen3", "mistral", "phi3", "gemma2", "mixtral")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_from_their_own_plan_checks_and_verifies(family: str) -> None:
    pytest.importorskip("transformers")
    sample = build(Family(family, "causal"))
    model, batch = sample.model, {n: leaf[:2] for n, leaf in sample.batch.items()}
    facts = describe(model)
    text = draft(facts, 2, "hf", samples=2)
    loaded = load(Source("draft", text))
    examined = examine(loaded.require(), facts, 2)
    assert not examined.errors
    assert examined.resolved.mesh.size("tp") == 2
    assert not examined.resolved.not_executable
    assert len(examined.resolved.tensor) >= 8
    is_mixed = any("experts" in glob for glob in facts.hf_tp_plan)
    assert is_mixed == ("they stay whole on every rank" in text)
    found = compare_plan(model, loaded.require(), batch, steps=1)
    assert found.first_wrong() is None


@pytest.mark.parametrize(
    ("glob", "style"), [("h.*.experts", "moe_tp_experts"), ("h.*.experts.up", "packed_colwise")]
)
def test_using_their_plan_leaves_experts_whole_with_a_warning(glob: str, style: str) -> None:
    stacked = ParamFacts("h.0.experts.up", (4, 8, 8), "float32")
    facts = ModelFacts("M", (ModuleFacts("h.0.experts", "E", params=(stacked,)),))
    facts = replace(facts, hf_tp_plan={glob: style})
    plan = load(Source("p", "autoshard 1\ntensor { use transformers.tp_plan }\n")).require()
    (found,) = [d for d in examine(plan, facts).diagnostics if d.code == "AS216"]
    assert found.severity is Severity.WARNING
    assert "stay whole" in found.label
